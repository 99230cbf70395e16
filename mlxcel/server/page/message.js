// One message of a chat as it is shown.
import { render } from "./markup.js";

const ENDINGS = {
  eos: "finished",
  stop: "finished",
  stop_token: "ended at a stop token",
  stop_string: "ended at a stop string",
  grammar: "structure complete",
  max_tokens: "token limit reached",
  length: "token limit reached",
  context: "context is full",
  time_limit: "time limit reached",
  indent_limit: "ended at the indent limit",
  loop: "ended: it was repeating itself",
  tool_calls: "asks for a tool",
};
const ACTIONS = {
  user: [["edit", "Edit"], ["delete", "Delete"]],
  assistant: [["copy", "Copy"], ["regenerate", "Regenerate"], ["edit", "Edit"]],
};

/** A list item for a message; `showMessage` fills it, as often as the message changes. */
export function messageNode(message) {
  const node = document.getElementById("message-template").content.firstElementChild.cloneNode(true);
  node.dataset.role = message.role;
  node.querySelector(".who").textContent = message.role === "user" ? "You" : "Reply";
  for (const [action, label] of ACTIONS[message.role]) {
    const button = document.createElement("button");
    button.className = "plain";
    button.dataset.action = action;
    button.textContent = label;
    node.querySelector(".actions").append(button);
  }
  showMessage(node, message);
  return node;
}

export function showMessage(node, message) {
  const text = node.querySelector(".text");
  if (message.role === "user") {
    text.textContent = message.content;
    return;
  }
  const before = node.dataset.state;
  node.dataset.state = message.state;
  render(text, message.content);
  showThinking(node, message);
  showFigures(node, message);
  const open = message.state === "waiting" || message.state === "writing";
  node.querySelector(".actions").hidden = open || (message.state === "failed" && !message.content);
  if (message.state !== before) showFault(node, message);
}

function showThinking(node, { thinking, content }) {
  const details = node.querySelector(".thinking");
  details.hidden = !thinking;
  if (!thinking) return;
  render(details.querySelector(".thought"), thinking);
  const phase = content ? "over" : "on";
  if (details.dataset.phase !== phase) details.open = phase === "on"; // what the user opens later stays open
  details.dataset.phase = phase;
}

function showFigures(node, reply) {
  const spans = figures(reply).map((text) => {
    const span = document.createElement("span");
    span.textContent = text;
    return span;
  });
  node.querySelector(".figures").replaceChildren(...spans);
}

/** Rate, TTFT, counts and ending in words. */
export function figures({ state, cause, stop, usage, ttft, rate, warnings }) {
  const said = [];
  if (rate != null) said.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
  if (ttft != null) said.push(`first after ${ttft < 10000 ? `${Math.round(ttft)} ms` : `${(ttft / 1000).toFixed(1)} s`}`);
  if (usage) {
    const cached = usage.cached ? ` (${usage.cached} cached)` : "";
    said.push(`prompt ${usage.prompt}${cached}`, `generated ${usage.generated}`);
  }
  if (state === "stopped") said.push("stopped by you");
  else if (cause) said.push(ending(cause, stop));
  return [...said, ...(warnings ?? [])];
}

function ending(cause, stop) {
  if (cause === "stop_string" && typeof stop === "string") return `ended at “${stop}”`;
  return ENDINGS[cause] ?? String(cause).replaceAll("_", " ");
}

function showFault(node, { state, error }) {
  const place = node.querySelector(".fault");
  place.hidden = state !== "failed";
  if (state !== "failed") return;
  place.querySelector(".fault-text").textContent = error?.message ?? "The reply failed.";
  const id = place.querySelector(".fault-id");
  const facts = [error?.status ? `status ${error.status}` : "", error?.requestId ? `request ${error.requestId}` : ""];
  id.textContent = facts.filter(Boolean).join(" · ");
  id.hidden = !id.textContent;
  countDown(place.querySelector("[data-action=retry]"), error?.retryAt ?? 0);
}

/** The server said when to come back: until then the button counts, and waits. */
function countDown(button, retryAt) {
  const left = Math.min(600, Math.ceil((retryAt - Date.now()) / 1000));
  button.disabled = left > 0;
  button.textContent = left > 0 ? `Retry in ${left} s` : "Retry";
  if (left > 0) setTimeout(countDown, 1000, button, retryAt);
}
