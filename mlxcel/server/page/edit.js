// A message being edited where it stands.

/** `onSave(content)` hears the new text of `message`; without one everything is as before. */
export function editInPlace(node, message, onSave) {
  if (node.querySelector(".edit")) return;
  const form = document.getElementById("edit-template").content.firstElementChild.cloneNode(true);
  const area = form.querySelector("textarea");
  const text = node.querySelector(".text");
  const foot = node.querySelector(".foot");
  area.value = message.content;
  form.querySelector("[data-action=save]").textContent = message.role === "user" ? "Send" : "Save";
  text.hidden = foot.hidden = true;
  text.after(form);
  area.focus();

  const close = () => {
    form.remove();
    text.hidden = foot.hidden = false;
    foot.querySelector("[data-action=edit]").focus();
  };
  const save = () => {
    if (area.value.trim()) onSave(area.value);
  };
  form.querySelector("[data-action=cancel]").addEventListener("click", close);
  form.querySelector("[data-action=save]").addEventListener("click", save);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    else save();
    event.preventDefault();
  });
}
