// Server-sent events, read from the body of a reply: https://html.spec.whatwg.org/multipage/server-sent-events.html

/** The data of each event of a stream of bytes. Leaving the loop closes the connection. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const whole = rest.endsWith("\r") ? rest.slice(0, -1) : rest; // its \n may be on the way
      const lines = whole.split(/\r\n|\n|\r/);
      rest = lines.pop() + rest.slice(whole.length);
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that has failed cannot be cancelled any more
  }
}
