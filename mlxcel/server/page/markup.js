// A reply's Markdown as elements: every piece of text becomes a text node, and no attribute is made from it.

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^(#{1,6})\s+(\S.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(\S.*)$/;
const QUOTE = /^\s*>\s?/;
const RULE = /^\s*(?:-{3,}|\*{3,}|_{3,})\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const DASHES = /^\s*\|(?:\s*:?-+:?\s*\|)+\s*$/;

/** Show `text` in `place`. What is there from a shorter text stays where it is the same, so a selection survives. */
export function render(place, text) {
  const found = blocks(text);
  while (place.childNodes.length > found.length) place.lastChild.remove();
  for (const [at, block] of found.entries()) {
    const source = block.kind + "\n" + block.lines.join("\n");
    const there = place.childNodes[at];
    if (there?.source === source) continue;
    if (block.kind === "code" && there?.kind === "code") fillCode(there, block);
    else if (there) there.replaceWith(element(block));
    else place.append(element(block));
    Object.assign(place.childNodes[at], { source, kind: block.kind });
  }
}

/** The blocks of a text, in order: {kind, lines, language?}. */
function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const fence = FENCE.exec(lines[at]);
    if (fence) {
      const [, indent, marks, language] = fence;
      const block = { kind: "code", language: language.trim(), lines: [] };
      for (at++; at < lines.length && !closes(lines[at], marks); at++) block.lines.push(unindented(lines[at], indent));
      at++;
      found.push(block);
      continue;
    }
    const kind = kindAt(lines, at);
    const block = { kind, lines: [lines[at++]] };
    while (at < lines.length && goesOn(block, lines, at)) block.lines.push(lines[at++]);
    if (kind !== "blank") found.push(block);
  }
  return found;
}

function closes(line, marks) {
  const trimmed = line.trim();
  return trimmed.length >= marks.length && trimmed === marks[0].repeat(trimmed.length);
}

function unindented(line, indent) {
  return line.startsWith(indent) ? line.slice(indent.length) : line.trimStart();
}

function kindAt(lines, at) {
  const line = lines[at] ?? "";
  if (line.trim() === "") return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  if (ROW.test(line) && DASHES.test(lines[at + 1] ?? "")) return "table";
  return "text";
}

function goesOn({ kind, lines: before }, lines, at) {
  const next = kindAt(lines, at);
  if (kind === "list" && next === "list") return belongs(before[0], lines[at]);
  if (kind === "list" && next === "blank") return kindAt(lines, at + 1) === "list" && belongs(before[0], lines[at + 1]);
  if (kind === "list") return next === "text" && /^\s/.test(lines[at]);
  if (kind === "table") return ROW.test(lines[at]);
  return kind === next && kind !== "heading" && kind !== "rule";
}

/** Whether an item is one of the list that began with `first`: deeper, or of the same sort. */
function belongs(first, line) {
  const [[, outer, one], [, indent, other]] = [ITEM.exec(first), ITEM.exec(line)];
  return indent.length > outer.length + 1 || ordered(one) === ordered(other);
}

const ordered = (mark) => /\d/.test(mark);

function element(block) {
  if (block.kind === "code") return code(block);
  if (block.kind === "list") return list(block.lines);
  if (block.kind === "table") return table(block.lines);
  if (block.kind === "rule") return document.createElement("hr");
  if (block.kind === "heading") {
    const [, marks, words] = HEADING.exec(block.lines[0]);
    return withText(document.createElement(`h${Math.min(6, marks.length + 3)}`), words);
  }
  if (block.kind === "quote") {
    const quote = document.createElement("blockquote");
    return withText(quote, block.lines.map((line) => line.replace(QUOTE, "")).join("\n"));
  }
  return withText(document.createElement("p"), block.lines.join("\n"));
}

function code(block) {
  const figure = document.getElementById("code-template").content.firstElementChild.cloneNode(true);
  fillCode(figure, block);
  return figure;
}

function fillCode(figure, block) {
  figure.querySelector(".language").textContent = block.language;
  figure.querySelector("code").textContent = block.lines.join("\n");
}

function list(lines) {
  const open = []; // the lists that the next item may belong to, outermost first: {node, indent}
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      if (line.trim()) withText(open.at(-1).node.lastElementChild, "\n" + line.trim());
      continue;
    }
    const indent = item[1].length;
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    if (!open.length || indent > open.at(-1).indent + 1) {
      const node = document.createElement(ordered(item[2]) ? "ol" : "ul");
      open.at(-1)?.node.lastElementChild.append(node);
      open.push({ node, indent });
    }
    const entry = withText(document.createElement("li"), item[3]);
    if (ordered(item[2])) entry.value = parseInt(item[2], 10);
    open.at(-1).node.append(entry);
  }
  return open[0].node;
}

function table(lines) {
  const node = document.createElement("table");
  for (const [at, line] of lines.entries()) {
    if (at === 1) continue; // the dashes
    const row = node.insertRow();
    const cells = line.trim().slice(1, -1).split("|");
    for (const cell of cells) row.append(withText(document.createElement(at ? "td" : "th"), cell.trim()));
  }
  const wide = document.createElement("div");
  wide.className = "wide-table";
  wide.append(node);
  return wide;
}

const SPANS = [
  ["**", "strong"],
  ["*", "em"],
];

/** Append text with its `code`, **strong** and *emphasised* spans. Linear: a mark without a partner is searched once. */
function withText(node, text) {
  const hopeless = new Set();
  let plain = 0;
  const span = (from, to, mark, name) => {
    node.append(text.slice(plain, from));
    const inner = document.createElement(name);
    inner.textContent = text.slice(from + mark.length, to);
    node.append(inner);
    plain = to + mark.length;
    return plain;
  };
  for (let at = 0; at < text.length; ) {
    const ticks = text[at] === "`" ? /^`+/.exec(text.slice(at, at + 64))[0] : "";
    if (ticks) {
      const end = hopeless.has(ticks) ? -1 : text.indexOf(ticks, at + ticks.length);
      if (end > 0) at = span(at, end, ticks, "code");
      else {
        hopeless.add(ticks);
        at += ticks.length;
      }
      continue;
    }
    const [mark, name] = SPANS.find(([start]) => text.startsWith(start, at)) ?? ["", ""];
    const end = mark && !hopeless.has(mark) ? partner(text, at, mark) : -1;
    if (mark && end < 0) hopeless.add(mark);
    at = end > 0 ? span(at, end, mark, name) : at + Math.max(1, mark.length);
  }
  node.append(text.slice(plain));
  return node;
}

/** Where the mark at `at` closes: -1 nowhere, 0 when it opens nothing, as in 2 * 3 or a*b. */
function partner(text, at, mark) {
  const before = text[at - 1] ?? " ";
  const first = text[at + mark.length] ?? " ";
  if (/[\s*]/.test(first) || /[\w*]/.test(before)) return 0;
  const end = text.indexOf(mark, at + mark.length);
  if (end < 0) return -1;
  const inside = text.slice(at + mark.length, end);
  return /\s/.test(text[end - 1]) || inside.includes("\n\n") || text[end + mark.length] === "*" ? 0 : end;
}
