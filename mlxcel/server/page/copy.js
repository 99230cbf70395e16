// Text to the clipboard, with the button saying so.

export async function copyText(text, button) {
  const done = await put(text);
  const label = button.textContent;
  if (button.dataset.busy) return;
  button.dataset.busy = "yes";
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => {
    button.textContent = label;
    delete button.dataset.busy;
  }, 1500);
}

async function put(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  // Over plain http from another machine there is no navigator.clipboard; the old command still works.
  const area = document.createElement("textarea");
  area.className = "unseen";
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
