// Whether the server would answer, as /health says it: asked every second until it is ready, and seldom from then on.
import { call } from "./server.js";

const SOON = 1000; // ms between two questions while the server is not ready
const SELDOM = 10000; // ms, while it is
const NAMES = {
  connecting: "Connecting",
  loading: "Loading the model",
  ready: "Ready",
  busy: "Busy",
  draining: "Shutting down",
  unreachable: "Unreachable",
  failed: "Failed",
};
const badge = document.getElementById("state");
const label = document.getElementById("state-name");
let current = "connecting";
let timer = null;
let asking = false;
let listener = () => {};

/** Start asking; `onChange(state)` hears every change of state. */
export function watchServer(onChange) {
  listener = onChange;
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) check();
  });
  check();
}

export const serverState = () => current;
export const answersNow = () => current === "ready" || current === "busy";

/** What the error of a reply says about the server. */
export function heard(error) {
  if (error.code === "queue_full" || error.code === "kv_exhausted") {
    become("busy", error.message);
    again(Math.max(SOON, (error.retryAt ?? 0) - Date.now()));
  } else if (error.status === 0 || error.status === 503) check();
}

async function check() {
  if (asking) return;
  asking = true;
  try {
    await call("health");
    become("ready", "");
  } catch (refusal) {
    become(...meaning(refusal));
  } finally {
    asking = false;
  }
  again(current === "ready" ? SELDOM : SOON);
}

function meaning({ status, message }) {
  if (status === 0) return ["unreachable", message];
  if (status === 503 && message === "Loading model") return ["loading", message];
  if (status === 503 && message === "Shutting down") return ["draining", message];
  return ["failed", message];
}

function again(delay) {
  clearTimeout(timer);
  timer = setTimeout(() => (document.hidden && current === "ready" ? again(SELDOM) : check()), delay);
}

function become(state, why) {
  badge.title = why;
  if (state === current) return;
  current = state;
  badge.dataset.state = state;
  label.textContent = NAMES[state];
  listener(state);
}
