// The list of chats in the drawer.

export function showChatList(list, chats, current) {
  const items = chats.map(({ id, title }) => {
    const item = document.createElement("li");
    const open = document.createElement("button");
    const remove = document.createElement("button");
    item.dataset.id = id;
    item.toggleAttribute("data-current", id === current);
    if (id === current) open.setAttribute("aria-current", "true");
    open.className = "open";
    open.textContent = open.title = title;
    remove.className = "remove";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Delete the chat ${title}`);
    item.append(open, remove);
    return item;
  });
  list.replaceChildren(...items);
}
