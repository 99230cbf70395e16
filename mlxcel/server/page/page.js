// The chat page: what its controls do.
import * as chats from "./chats.js";
import { showChatList } from "./chat_list.js";
import { copyText } from "./copy.js";
import { openDrawers } from "./drawers.js";
import { editInPlace } from "./edit.js";
import { showServer } from "./head.js";
import { messageNode, showMessage } from "./message.js";
import { emptyReply, readReply, requestBody } from "./reply.js";
import { keepAtEnd } from "./scroll.js";
import * as settings from "./settings.js";
import { answersNow, heard, serverState, watchServer } from "./status.js";
import { askForKey } from "./key.js";

const byId = (id) => document.getElementById(id);
const list = byId("messages");
const input = byId("input");
const drawers = openDrawers();
const showEnd = keepAtEnd(byId("scroll"), list, byId("latest"));
const nodes = new WeakMap(); // the item that shows a message
const SAVE_EVERY = 2000; // ms, while a reply is written
let chat = chats.newChat();
let running = null; // {chat, reply, controller}: one reply at a time

// --- showing ---------------------------------------------------------------------------------------------------------

function showChat(shown) {
  chat = shown;
  list.replaceChildren(...chat.messages.map(nodeOf));
  byId("welcome").hidden = chat.messages.length > 0;
  document.title = chat.messages.length ? `${chat.title} – mlxcel` : "mlxcel";
  showList();
  showEnd();
}

function nodeOf(message) {
  const node = messageNode(message);
  nodes.set(message, node);
  return node;
}

function showList() {
  showChatList(byId("chat-list"), chats.allChats(), chat.id);
  byId("export-chat").disabled = chat.messages.length === 0;
  byId("clear-all").disabled = chats.allChats().length === 0;
}

function showControls() {
  const reachable = answersNow();
  if (reachable && input.disabled) {
    input.disabled = false;
    input.placeholder = "Write a message";
    if (document.activeElement === document.body) input.focus();
  }
  list.toggleAttribute("data-running", Boolean(running));
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  byId("send").disabled = !reachable || !input.value.trim();
}

const say = (text) => (byId("said").textContent = text);

// --- asking ----------------------------------------------------------------------------------------------------------

/** Whether a reply may be asked for; a setting that cannot be read is shown. */
function mayAsk() {
  if (running) return false;
  const faulty = settings.faultyField();
  if (!faulty) return true;
  drawers.open("panel");
  faulty.focus();
  return false;
}

function send() {
  const content = input.value;
  if (!content.trim() || !answersNow() || !mayAsk()) return;
  input.value = "";
  chat.messages.push({ role: "user", content });
  answer();
}

/** Ask for the reply to the chat as it stands, and show it as it comes. */
async function answer() {
  const asked = { chat, reply: emptyReply(), controller: new AbortController() };
  running = asked;
  const body = requestBody(chat.messages, settings.systemMessage(), settings.changedSettings());
  chat.messages.push(asked.reply);
  chats.saveChat(chat);
  showChat(chat);
  showControls();
  say("The reply is being written.");
  await read(asked, body);
  running = null;
  saveIfKept(asked.chat);
  showList();
  showControls();
  say(asked.reply.error ? "" : `${asked.reply.state === "stopped" ? "Stopped. " : ""}${asked.reply.content}`);
}

/** A chat that was deleted while its reply was written does not come back. */
function saveIfKept(its) {
  if (chats.chatById(its.id) === its) chats.saveChat(its);
}

async function read({ chat: its, reply, controller }, body) {
  let shownAt = null;
  let savedAt = performance.now();
  const show = () => {
    shownAt = null;
    showMessage(nodes.get(reply), reply);
  };
  const changed = () => {
    shownAt ??= requestAnimationFrame(show); // many tokens a frame are one change of the page
    if (performance.now() - savedAt < SAVE_EVERY) return;
    savedAt = performance.now();
    saveIfKept(its);
  };
  await readReply(reply, body, controller.signal, changed);
  if (reply.error?.status === 401 && (await askForKey())) {
    Object.assign(reply, emptyReply());
    showServer();
    return read({ chat: its, reply, controller }, body);
  }
  if (reply.error) heard(reply.error);
  cancelAnimationFrame(shownAt);
  show();
}

function stop() {
  running?.controller.abort();
}

/** Ask again from a message on: what stood behind it is dropped. */
function answerFrom(at) {
  if (!mayAsk()) return;
  chat.messages.length = at;
  answer();
}

// --- what can be done with a message ---------------------------------------------------------------------------------

const actions = {
  retry: (at) => answerFrom(at),
  regenerate: (at) => answerFrom(at),
  copy: (at, button) => copyText(chat.messages[at].content, button),
  "copy-code": (at, button) => copyText(button.closest("figure").querySelector("code").textContent, button),
  edit: (at) => {
    const message = chat.messages[at];
    editInPlace(nodes.get(message), message, (content) => save(at, { ...message, content }));
  },
  delete: (at) => {
    if (running?.chat === chat) stop();
    const next = chat.messages.findIndex(({ role }, place) => place > at && role === "user");
    chat.messages.splice(at, (next < 0 ? chat.messages.length : next) - at);
    keepOrRemove();
  },
};

/** An edited message: what follows it is dropped, and one of the user's is answered anew. */
function save(at, message) {
  if (message.role === "user" && !mayAsk()) return;
  const words = message.role === "user" ? message : { ...emptyReply(), content: message.content, state: "done", cause: "edited" };
  chat.messages.splice(at, Infinity, words);
  if (message.role === "user") answer();
  else keepOrRemove();
}

function keepOrRemove() {
  if (chat.messages.length) chats.saveChat(chat);
  else chats.removeChat(chat.id);
  showChat(chat);
}

list.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-action]");
  const node = button?.closest(".message");
  const at = node ? [...list.children].indexOf(node) : -1;
  if (at >= 0) actions[button.dataset.action]?.(at, button);
});

// --- chats -----------------------------------------------------------------------------------------------------------

byId("new-chat").addEventListener("click", () => {
  showChat(chats.newChat());
  drawers.closeIfOver();
  input.focus();
});

byId("chat-list").addEventListener("click", ({ target }) => {
  const id = target.closest("li")?.dataset.id;
  if (!id) return;
  if (target.closest(".remove")) {
    forget(id);
    return;
  }
  showChat(chats.chatById(id) ?? chat);
  drawers.closeIfOver();
});

function forget(id) {
  if (running?.chat.id === id) stop();
  chats.removeChat(id);
  if (chat.id === id) showChat(chats.newChat());
  else showList();
}

byId("clear-all").addEventListener("click", () => byId("clear-dialog").showModal());
byId("clear-cancel").addEventListener("click", () => byId("clear-dialog").close());
byId("clear-yes").addEventListener("click", () => {
  byId("clear-dialog").close();
  stop();
  chats.removeAllChats();
  showChat(chats.newChat());
});

byId("export-chat").addEventListener("click", () => {
  const about = { model: byId("model").textContent, settings: settings.typedSettings() };
  const text = JSON.stringify(chats.exported(chat, about), null, 2);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `chat-${new Date(chat.created).toISOString().slice(0, 10)}-${chat.id}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});

// --- keys, and start -------------------------------------------------------------------------------------------------

input.addEventListener("input", showControls);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("send").addEventListener("click", () => {
  send();
  input.focus();
});
byId("stop").addEventListener("click", () => {
  stop();
  input.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (!drawers.closeIfOver()) stop();
});

settings.openSettings();
chats.openChats({
  onFull: () => (byId("storage-note").textContent = "This browser keeps no more: export what matters, and remove old chats."),
  onOther: (id) => {
    if (id !== chat.id || running?.chat === chat) showList();
    else showChat(chats.chatById(id) ?? chats.newChat());
  },
});
showChat(chats.allChats()[0] ?? chat);
watchServer(async () => {
  showControls();
  if (serverState() === "ready") await showServer();
});
