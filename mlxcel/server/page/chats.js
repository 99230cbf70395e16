// The chats of this browser: one localStorage entry each, so that two tabs do not overwrite each other's.
//
// A chat is {id, title, created, updated, messages}; times are ms since 1970. A message is {role: "user", content} or
// a reply as reply.js makes it.
const PREFIX = "mlxcel.chat.";
const TITLE = 60; // characters
const chats = new Map();
let complain = () => {};

/** Read what is stored. `onFull()` hears that the browser would not keep a chat; `onOther(id)` that another tab did. */
export function openChats({ onFull, onOther }) {
  complain = onFull;
  for (const name of stored()) read(name);
  window.addEventListener("storage", ({ key, storageArea }) => {
    if (storageArea !== localStorage) return;
    if (!key?.startsWith(PREFIX)) return;
    read(key);
    onOther(key.slice(PREFIX.length));
  });
}

export const allChats = () => [...chats.values()].sort((one, other) => other.updated - one.updated);
export const chatById = (id) => chats.get(id);

/** A chat that is stored once it has a message. */
export function newChat() {
  const bytes = crypto.getRandomValues(new Uint8Array(8)); // crypto.randomUUID is missing over plain http
  const id = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "New chat", created: Date.now(), updated: Date.now(), messages: [] };
}

export function saveChat(chat) {
  const first = chat.messages.find(({ role }) => role === "user");
  chat.title = first ? first.content.trim().replace(/\s+/g, " ").slice(0, TITLE) || "New chat" : "New chat";
  chat.updated = Date.now();
  chats.set(chat.id, chat);
  try {
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
  } catch {
    complain();
  }
}

export function removeChat(id) {
  chats.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    return; // nothing was stored
  }
}

/** Without any chat there is nothing of ours left but the settings. */
export function removeAllChats() {
  for (const name of stored()) removeChat(name.slice(PREFIX.length));
  chats.clear();
}

/** A chat for a file: its words and figures, what was set, and whose they are. */
export function exported(chat, { model, settings }) {
  const { title, created, updated, messages } = chat;
  const times = { created: new Date(created).toISOString(), updated: new Date(updated).toISOString() };
  return { format: "mlxcel-chat", version: 1, title, ...times, model, settings, messages };
}

function stored() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return []; // the browser keeps nothing for this page
  }
}

function read(name) {
  const id = name.slice(PREFIX.length);
  let chat = null;
  try {
    chat = JSON.parse(localStorage.getItem(name));
  } catch {
    chat = null; // not ours, or cut short: left alone
  }
  if (!sound(chat, id)) {
    chats.delete(id);
    return;
  }
  for (const message of chat.messages) {
    if (message.state === "waiting" || message.state === "writing") message.state = "stopped"; // its page was closed
  }
  chats.set(id, chat);
}

function sound(chat, id) {
  const isMessage = (it) => ["user", "assistant"].includes(it?.role) && typeof it.content === "string";
  return chat?.id === id && typeof chat.title === "string" && Number.isFinite(chat.updated) && Number.isFinite(chat.created)
    && Array.isArray(chat.messages) && chat.messages.every(isMessage);
}
