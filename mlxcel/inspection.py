"""What `mlxcel inspect` finds, as data: the fields of these records are the keys of its --json."""

from __future__ import annotations

import attrs


@attrs.frozen
class Shapes:
    """By their axis letters, and how many layers are of each kind. None: the family's config does not say."""

    V: int
    D: int
    H: int | None
    K: int | None
    d: int | None
    F: int | None
    L: int
    context: int  # positions the model was made for
    full_layers: int
    window_layers: int
    windows: tuple[int, ...]  # each that a layer has
    recurrent_layers: int
    experts: int | None  # of a layer
    experts_per_token: int | None


@attrs.frozen
class Parameters:
    """Values of the weights that are used; `active` are those that one token meets."""

    total: int
    active: int


@attrs.frozen
class Weights:
    """Bytes of the tensors that are used in the file, and of the weights in memory by the type of the computation."""

    tensors: int
    disk_bytes: int
    device_bytes: dict[str, int]


@attrs.frozen
class Unused:
    """Tensors of the file that the family does not ask for; `names` are the first."""

    count: int
    bytes: int
    names: tuple[str, ...]


@attrs.frozen
class KVBytes:
    """Bytes of one token in the layers that keep every position, and in those with a window; of rings and recurrent
    state that a row has, however short it is; and of a row at full context in all."""

    full_per_token: int
    window_per_token: int
    window_per_row: int
    state_per_row: int
    row: int


@attrs.frozen
class MemoryFacts:
    """Bytes. `kind` is "host" or "device"; `share` of a device is for everything, of a host for the KV of what the
    rest leaves."""

    kind: str
    total: int
    free: int
    share: float


@attrs.frozen
class Fit:
    """What the loader does with these settings. `reason` says why it refuses, or lowers the context, `hint` what helps
    against a refusal. `tokens` is null where no layer keeps every position: then any number fits."""

    dtype: str
    ctx_size: int
    prefill_chunk: int
    parallel: int
    weight_bytes: int
    workspace_bytes: int
    margin_bytes: int  # that a device keeps for its runtime
    kv_budget_bytes: int
    needed_bytes: int  # all of these, and KV at `context`, or at what was asked for where that does not fit
    fits: bool
    context: int | None
    reason: str | None
    hint: str | None
    tokens: int | None
    tokens_per_row: int
    rows_at_full_context: int


@attrs.frozen
class Unsupported:
    """What stands in the way of a run: "format", "family", "config", "tensors" or "tokenizer", and why."""

    part: str
    reason: str
    hint: str | None


@attrs.frozen
class Inspection:
    """A field is None where what is unsupported hides it."""

    name: str
    source: str
    path: str
    disk_bytes: int  # of all its files
    format: str | None = None
    quantisation: str | None = None
    architecture: str | None = None
    family: str | None = None
    shapes: Shapes | None = None
    parameters: Parameters | None = None
    weights: Weights | None = None
    unused: Unused | None = None
    kv: KVBytes | None = None
    memory: MemoryFacts | None = None
    fit: Fit | None = None
    unsupported: tuple[Unsupported, ...] = ()
