// The panel: a system message and the sampling values. A field that is empty is not sent.
const PLACE = "mlxcel.settings";

/** Whether a number is in its range is the server's to say; a whole one must survive the way through JSON. */
const number = (whole) => (text) => {
  const value = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(text) ? Number(text) : NaN;
  if (!Number.isFinite(value)) throw new Error("This is not a number.");
  if (whole && !Number.isInteger(value)) throw new Error("A whole number is needed.");
  if (whole && !Number.isSafeInteger(value)) throw new Error(`At most ${Number.MAX_SAFE_INTEGER} here.`);
  return value;
};
const real = number(false);
const integer = number(true);

/** One string a line; \n, \t and \\ stand for a line break, a tab and a backslash. */
function strings(text) {
  const escapes = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\[nt\\]/g, (escape) => escapes[escape]));
}

// `names`: the field of a request, then other names it may have in /props.
const FIELDS = [
  { names: ["temperature"], label: "Temperature", read: real },
  { names: ["top_k"], label: "Top-k", read: integer },
  { names: ["top_p"], label: "Top-p", read: real },
  { names: ["min_p"], label: "Min-p", read: real },
  { names: ["max_tokens", "n_predict"], label: "Max tokens", read: integer },
  { names: ["seed"], label: "Seed", read: integer },
  { names: ["repetition_penalty", "repeat_penalty"], label: "Repetition penalty", read: real, broad: true },
  { names: ["stop"], label: "Stop strings, one a line", read: strings, broad: true, lines: 2 },
];
const SHOWN = { max_tokens: { "-1": "to the end" }, seed: { "-1": "random", null: "random" }, stop: { "": "none" } };

const system = document.getElementById("set-system");
const mark = document.getElementById("panel-mark");
const inputs = new Map(FIELDS.map((field) => [field.names[0], build(field)]));

export function openSettings() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(PLACE)) ?? {};
  } catch {
    kept = {}; // unreadable, or no storage
  }
  for (const [name, input] of every()) {
    if (typeof kept[name] === "string") input.value = kept[name];
    input.addEventListener("input", () => {
      check(name);
      keep();
    });
    check(name);
  }
  document.getElementById("reset-settings").addEventListener("click", () => {
    for (const [name, input] of every()) {
      input.value = "";
      check(name);
    }
    keep();
  });
}

/** As it was typed, or "" where it is blank. */
export const systemMessage = () => (system.value.trim() ? system.value : "");

/** The first field that cannot be read, or null. */
export const faultyField = () => FIELDS.map(({ names }) => inputs.get(names[0])).find(isFaulty) ?? null;

/** The values that were filled in, by their names in a request; there must be no faulty field. */
export function changedSettings() {
  const filled = FIELDS.filter(({ names }) => inputs.get(names[0]).value.trim());
  return Object.fromEntries(filled.map(({ names: [name], read }) => [name, read(inputs.get(name).value.trim())]));
}

/** What is filled in, as it was typed. */
export function typedSettings() {
  const filled = every().filter(([, input]) => input.value.trim());
  return Object.fromEntries(filled.map(([name, input]) => [name, input.value]));
}

/** Show the server's own values in the empty fields, and where each comes from. */
export function showDefaults(params, origins) {
  for (const { names } of FIELDS) {
    const [name] = names;
    const known = names.find((one) => one in params);
    const value = known === undefined ? "" : String(params[known]);
    inputs.get(name).placeholder = SHOWN[name]?.[value] ?? rounded(value);
    const origin = names.map((one) => origins?.[one]).find((one) => typeof one === "string");
    inputs.get(name).title = origin ? `The server's value comes from: ${origin.replaceAll("_", " ")}` : "";
  }
}

/** A float32 such as 0.949999988079071 as people write it. */
function rounded(text) {
  return /\.\d{7,}$/.test(text) ? String(Number(Number(text).toPrecision(6))) : text;
}

const every = () => [["system", system], ...inputs];

function build({ names: [name], label, broad, lines }) {
  const place = document.createElement("div");
  place.className = broad ? "field broad" : "field";
  const title = document.createElement("label");
  const input = document.createElement(lines ? "textarea" : "input");
  const fault = document.createElement("p");
  title.textContent = label;
  title.htmlFor = input.id = `set-${name}`;
  fault.className = "fault-text";
  fault.id = `${input.id}-fault`;
  input.setAttribute("aria-describedby", fault.id);
  input.autocomplete = "off";
  if (lines) input.rows = lines;
  else input.inputMode = "decimal";
  place.append(title, input, fault);
  document.getElementById("fields").append(place);
  return input;
}

function check(name) {
  const input = name === "system" ? system : inputs.get(name);
  const place = input.parentElement;
  place.toggleAttribute("data-changed", Boolean(input.value.trim()));
  mark.hidden = Object.keys(typedSettings()).length === 0;
  if (input === system) return;
  const fault = faultOf(name, input.value.trim());
  place.querySelector(".fault-text").textContent = fault;
  if (fault) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
}

const isFaulty = (input) => input.getAttribute("aria-invalid") === "true";

function faultOf(name, text) {
  try {
    if (text) FIELDS.find(({ names }) => names[0] === name).read(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

function keep() {
  try {
    localStorage.setItem(PLACE, JSON.stringify(typedSettings()));
  } catch {
    return; // the values still hold until the page is closed
  }
}
