// The API key: in this tab's sessionStorage, in the Authorization header, and nowhere else.
const PLACE = "mlxcel.key";
const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key-field");
const fault = document.getElementById("key-fault");
let inMemory = ""; // where the browser refuses storage
let answers = [];

export function storedKey() {
  try {
    return sessionStorage.getItem(PLACE) ?? inMemory;
  } catch {
    return inMemory;
  }
}

function keep(key) {
  inMemory = key;
  try {
    sessionStorage.setItem(PLACE, key);
  } catch {
    return; // kept in memory
  }
}

/** Ask for a key, since a call answered 401. True once there is a new one to try, false when the user declines. */
export function askForKey() {
  if (!dialog.open) {
    document.getElementById("key-why").textContent = storedKey()
      ? "The server did not accept the key."
      : "This server asks for an API key.";
    fault.textContent = "";
    field.value = "";
    dialog.showModal();
    field.focus();
  }
  return new Promise((resolve) => answers.push(resolve));
}

function settle(given) {
  dialog.close();
  field.value = "";
  for (const resolve of answers) resolve(given);
  answers = [];
}

function save() {
  const key = field.value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    fault.textContent = key ? "A key has printable ASCII characters only, and no spaces." : "Enter a key.";
    field.focus();
    return;
  }
  keep(key);
  settle(true);
}

document.getElementById("key-save").addEventListener("click", save);
document.getElementById("key-cancel").addEventListener("click", () => settle(false));
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter") save();
});
dialog.addEventListener("cancel", (event) => {
  event.preventDefault();
  settle(false);
});
