// OpenAI's client for Node against the server at argv[2]: what it made of each call, as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "<<héllo|world>>" }];
const asked = { model: "tiny", messages };

async function failure(call) {
  try {
    await call();
    return null;
  } catch (error) {
    const { status, code, param, type } = error;
    return { kind: error.constructor.name, status, code, param, type };
  }
}

async function told(stream, text) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return {
    text: chunks.map((chunk) => text(chunk.choices[0]) ?? "").join(""),
    ids: new Set(chunks.map((chunk) => chunk.id)).size,
    finish: chunks.at(-1).choices[0].finish_reason,
  };
}

const chat = await client.chat.completions.create({ ...asked, n: 2, logprobs: true, top_logprobs: 1 });
const helper = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
const deltas = [];
helper.on("content", (delta) => deltas.push(delta));
const { object, data } = await client.models.list();
const stopped = await client.chat.completions.create({ ...asked, stream: true });
for await (const _ of stopped) break; // leaving the loop closes the connection

console.log(
  JSON.stringify({
    chat: chat.choices.map((choice) => [choice.message.content, choice.finish_reason]),
    bytes: chat.choices[0].logprobs.content.map((token) => token.bytes),
    usage: chat.usage,
    completion: (await client.completions.create({ model: "tiny", prompt: "<<abc>>", max_tokens: 2 })).choices[0].text,
    streamed: await told(await client.chat.completions.create({ ...asked, stream: true }), (c) => c.delta.content),
    older: await told(await client.completions.create({ model: "tiny", prompt: "<<a→b>>", stream: true }), (c) => c.text),
    helper: { text: await helper.finalContent(), usage: await helper.totalUsage(), joined: deltas.join("") },
    models: { object, ids: data.map((model) => model.id) },
    bad: await failure(() => client.chat.completions.create({ ...asked, temperature: 101 })),
    missing: await failure(() => client.chat.completions.create({ ...asked, model: "other" })),
    tools: await failure(() => client.chat.completions.create({ ...asked, tools: [{ type: "function" }] })),
    failed: await failure(() => client.completions.create({ model: "tiny", prompt: "<<a!>>" })),
    broken: await failure(async () => told(await client.completions.create({ model: "tiny", prompt: "<<a!>>", stream: true }), (c) => c.text)),
    after: (await client.completions.create({ model: "tiny", prompt: "<<fine>>" })).choices[0].text,
  }),
);
