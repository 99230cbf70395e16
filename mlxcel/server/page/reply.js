// One reply: asked for, read as it streams, and measured by this page's own clock.
//
// A reply is {role: "assistant", content, thinking, state, cause, stop, usage, ttft, rate, warnings, error}: `state` is
// waiting, writing, done, stopped or failed; `ttft` in ms from asking to the first chunk with a choice; `rate` in tokens
// a second between the first and the last token, null where there were fewer than two. `error` is {message, status, code,
// requestId, retryAt}, the last in ms since 1970.
import { Refusal, call, refusal } from "./server.js";
import { events } from "./sse.js";

export function emptyReply() {
  return {
    role: "assistant",
    content: "",
    thinking: "",
    state: "waiting",
    cause: null,
    stop: null,
    usage: null,
    ttft: null,
    rate: null,
    warnings: [],
    error: null,
  };
}

/** What is asked: the words of a chat up to the reply that is wanted, and `changed`, the settings that were filled in. */
export function requestBody(messages, system, changed) {
  const said = messages.filter(({ content, state }) => content !== "" || state === "done");
  const words = said.map(({ role, content }) => ({ role, content }));
  return {
    messages: system ? [{ role: "system", content: system }, ...words] : words,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...changed,
  };
}

/** Fill `reply` until it has ended, one way or another; `onChange()` after each piece. Throws nothing. */
export async function readReply(reply, body, signal, onChange) {
  const clock = tokenClock(reply);
  let requestId = null;
  try {
    const response = await call("v1/chat/completions", { body, signal });
    requestId = response.headers.get("X-Request-Id");
    let whole = false;
    for await (const data of events(response.body)) {
      whole = data === "[DONE]";
      if (whole) break;
      take(reply, JSON.parse(data), clock, requestId);
      onChange();
    }
    if (!whole) throw new Refusal("The connection was closed before the reply was complete.", { requestId });
    reply.state = "done";
  } catch (fault) {
    if (signal.aborted) reply.state = "stopped";
    else fail(reply, fault, requestId);
  }
  onChange();
}

function fail(reply, fault, requestId) {
  const { status, code, retryAfter } = fault instanceof Refusal ? fault : {};
  const message = fault instanceof Refusal ? fault.message : `The reply could not be read: ${fault.message}`;
  reply.state = "failed";
  reply.error = {
    message,
    status: status ?? 0,
    code: code ?? null,
    requestId: fault.requestId ?? requestId,
    retryAt: retryAfter ? Date.now() + 1000 * retryAfter : null,
  };
}

function take(reply, chunk, clock, requestId) {
  if (chunk.error) throw refusal(chunk, { requestId });
  if (Array.isArray(chunk.warnings)) reply.warnings = chunk.warnings.map(String);
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  if (choice) reply.state = "writing";
  reply.content += delta.content ?? "";
  reply.thinking += delta.reasoning_content ?? "";
  if (choice?.finish_reason) {
    reply.cause = choice.finish_cause ?? choice.finish_reason;
    reply.stop = choice.stop_reason ?? null;
  }
  if (chunk.usage) reply.usage = counts(chunk.usage);
  clock(Boolean(choice), Boolean(delta.content || delta.reasoning_content));
}

function counts(usage) {
  return {
    prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    generated: usage.completion_tokens,
  };
}

/** Notes when tokens came. The rate leaves out those of the first chunk: nothing says how long they took. */
function tokenClock(reply) {
  const asked = performance.now();
  let first = null; // {time, tokens}
  let last = null;
  return (hasChoice, hasText) => {
    const time = performance.now();
    const tokens = reply.usage?.generated ?? null;
    if (hasChoice && first === null) {
      first = { time, tokens: tokens ?? 1 };
      reply.ttft = time - asked;
    }
    if (first === null) return;
    if (tokens === null ? hasText : tokens > (last?.tokens ?? 0)) last = { time, tokens };
    if (last && last.tokens > first.tokens && last.time > first.time) {
      reply.rate = (1000 * (last.tokens - first.tokens)) / (last.time - first.time);
    }
  };
}
