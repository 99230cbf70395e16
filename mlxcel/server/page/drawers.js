// The two drawers: beside the conversation where there is room, over it (with the rest inert) where there is not.

export function openDrawers() {
  const narrow = window.matchMedia("(max-width: 860px)");
  const names = ["chats", "panel"];
  const drawer = (name) => document.getElementById(name);
  const button = (name) => document.getElementById(`${name}-button`);
  const isOpen = (name) => !drawer(name).hidden;

  function set(name, open) {
    if (open && narrow.matches) for (const other of names) if (other !== name) set(other, false);
    drawer(name).hidden = !open;
    button(name).setAttribute("aria-expanded", String(open));
    settle();
  }

  function settle() {
    const over = narrow.matches && names.some(isOpen);
    document.getElementById("scrim").hidden = !over;
    document.querySelector("main").inert = over;
  }

  /** Close what lies over the conversation, and give the focus back; false when nothing did. */
  function closeIfOver() {
    const over = narrow.matches ? names.filter(isOpen) : [];
    for (const name of over) {
      set(name, false);
      button(name).focus();
    }
    return over.length > 0;
  }

  for (const name of names) {
    button(name).addEventListener("click", () => set(name, !isOpen(name)));
    drawer(name).querySelector(".close").addEventListener("click", closeIfOver);
  }
  document.getElementById("scrim").addEventListener("click", closeIfOver);
  narrow.addEventListener("change", settle);
  if (!narrow.matches && window.innerWidth >= 1100) set("chats", true);
  return { open: (name) => set(name, true), closeIfOver };
}
