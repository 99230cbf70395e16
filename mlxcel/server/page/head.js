// Who answers: the served model, backend and device, and the server's own sampling values.
import { askForKey } from "./key.js";
import { call } from "./server.js";
import { showDefaults } from "./settings.js";

/** Ask the server about itself, and for a key where it wants one. */
export async function showServer() {
  let models, props;
  try {
    [models, props] = await Promise.all(["v1/models", "props"].map(async (path) => (await call(path)).json()));
  } catch (refusal) {
    if (refusal.status === 401 && (await askForKey())) await showServer();
    return; // the page works without: a message says what is wrong when it is sent
  }
  const served = models.data?.[0] ?? {};
  const model = document.getElementById("model");
  model.textContent = served.id ?? props.model_alias ?? "mlxcel";
  model.title = (models.data ?? []).map(({ id }) => id).join(", ");
  document.getElementById("machine").textContent = [props.backend, props.device].filter(Boolean).join(" · ");
  const { params = {}, n_ctx: window } = props.default_generation_settings ?? {};
  showDefaults(params, props.origin);
  document.getElementById("context").textContent = window
    ? `A chat, its reply included, may have ${window.toLocaleString("en")} tokens.`
    : "";
}
