"""Every error a user can meet: what is wrong, with the values concerned, and what to do next.

`code` is the machine-readable name (docs/spec/engine.md 1.4), `exit_code` what the command line ends with
(docs/spec/clients.md 1.3). An internal mistake of ours is never one of these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

HINT: Final = "hint: "
"""How the note of an exception begins that is its hint."""


class MlxcelError(Exception):
    """Base of all errors meant for users. `hint` is the next step, one line, or None; a traceback ends with it.

    Where several prompts were given to one call of the Python API, `index` says which it is about, and `outputs` holds
    what became of all of them.
    """

    code: str = "error"
    exit_code: ClassVar[int] = 3
    index: int | None = None
    outputs: Sequence[Any] = ()

    def __init__(self, message: str, *, hint: str | None = None, **values: Any) -> None:
        super().__init__(message)
        self.values = values
        self.hint = hint

    @property
    def hint(self) -> str | None:
        """What to do next; it ends the traceback, too."""
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint
        notes = [note for note in getattr(self, "__notes__", []) if not note.startswith(HINT)]
        self.__notes__ = notes if hint is None else [*notes, f"{HINT}{hint}"]

    @property
    def message(self) -> str:
        return str(self.args[0])


def shown(value: Any) -> str:
    """A value as a message names it, whatever it is: at most 64 characters, at a cost that its size does not choose."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python writes no integer of more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[:64]
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 64 else f"{text[:61]}..."


# --- before anything is loaded -----------------------------------------------------------------------------------


class UsageError(MlxcelError):
    """An option, a name or a value that cannot be obeyed."""

    code = "usage"
    exit_code = 2


class PluginError(MlxcelError):
    """A name registered twice, or a plugin that something needs and that failed to load."""

    code = "plugin"
    exit_code = 2


class UnknownModel(UsageError):
    """No path, registered name or stored model of this name."""

    code = "unknown_model"


# --- requests ------------------------------------------------------------------------------------------------------


class RequestError(MlxcelError, ValueError):
    """A request that is refused before it is queued. `field` names the offending field where there is one."""

    code = "invalid_request"
    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None, **values: Any) -> None:
        super().__init__(message, hint=hint, **values)
        self.field = field


class UnsupportedField(RequestError):
    """A field this version does not honour."""

    code = "unsupported_field"


class ContextTooLong(RequestError):
    """The prompt leaves no room for one token."""

    code = "context_length_exceeded"

    def __init__(self, prompt: int, limit: int) -> None:
        super().__init__(
            f"the prompt is {prompt} tokens, the context holds {limit} and needs room for one more",
            hint=f"shorten the prompt by {prompt - limit + 1} tokens, or start with --ctx-size {prompt + 1} or more",
            n_prompt_tokens=prompt,
            n_ctx=limit,
        )


class TemplateError(RequestError):
    """The chat template refused the messages, in its own words."""

    code = "template_error"


class EmptyPrompt(RequestError):
    """The prompt comes to no token."""

    code = "empty_prompt"


# --- checkpoints, models, devices ----------------------------------------------------------------------------------


class CheckpointError(MlxcelError):
    """A checkpoint that is damaged, incomplete, or that nothing here can read."""

    code = "checkpoint"


class DownloadError(MlxcelError):
    """A model that could not be fetched or stored."""

    code = "download"


class DeviceError(MlxcelError):
    """A device or a backend asked for by name that is not there."""

    code = "device"


class CacheFileError(MlxcelError):
    """A prompt cache file that is damaged, or another model's."""

    code = "cache_file"


# --- servers -------------------------------------------------------------------------------------------------------


class ServerError(MlxcelError):
    """A server that cannot be reached, lets nobody in, or fails in a way that has no class of its own. `code` is its
    word for that, `status` HTTP's, None where no reply came."""

    code = "server"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        hint: str | None = None,
        **values: Any,
    ) -> None:
        super().__init__(message, hint=hint, **values)
        self.code = code or self.code
        self.status = status


# --- engine ---------------------------------------------------------------------------------------------------------


class EngineError(MlxcelError):
    """Base of what the engine itself raises."""


class UnknownSequence(EngineError):
    """A sequence id that was never opened, or is closed."""

    code = "unknown_sequence"

    def __init__(self, sequence_id: int) -> None:
        super().__init__(
            f"sequence {sequence_id} is not open",
            hint="open() returns the ids in use; a closed id never comes back",
            sequence_id=sequence_id,
        )


class BatchShapeError(EngineError):
    """A step that cannot be run as asked: refused before any forward."""

    code = "batch_shape"


class CapacityError(EngineError):
    """The KV store cannot hold the positions a step would write."""

    code = "kv_exhausted"


class AdoptError(EngineError):
    """KV that cannot be used for a row. `reason`, its code too, is one of docs/spec/engine.md 8.6; the caller opens the
    row cold."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message, hint="open the row without it")
        self.code = self.reason = reason


class BackendFault(EngineError):
    """A step failed as a whole. `kv_intact` says whether rows outside the step still have their KV."""

    code = "backend_fault"

    def __init__(self, message: str, *, kv_intact: bool = True) -> None:
        super().__init__(f"inference backend error: {message}", hint="run with -vv for the backend's own trace")
        self.kv_intact = kv_intact


class EngineUnhealthy(EngineError):
    """Too many steps failed in a row: no row can be opened any more."""

    code = "engine_unhealthy"


class QueueFull(EngineError):
    """As many requests wait as may: refused before it is queued."""

    code = "queue_full"

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"{waiting} requests are waiting, which is as many as may",
            hint=f"try again in {retry_after} s, or start with a larger --max-queue-depth",
            retry_after=retry_after,
        )


class ShuttingDown(EngineError):
    """No request is taken any more, or what ran was cut off at the end of the time it was given."""

    code = "shutting_down"


class RequestTimeout(EngineError):
    """The time of a request is over, whether it waited or ran."""

    code = "timeout"


class SlowClient(EngineError):
    """A client left more unread than is kept for it."""

    code = "slow_client"


class RowError(EngineError):
    """A fault of one row. Its neighbours are unaffected."""

    code = "row"


class RowFault(RowError):
    """Something behind the forward failed for one row: its text, a plugin's finish step."""

    code = "row_fault"


class NumericFault(RowError):
    """NaN or +inf in the logits of a row."""

    code = "numeric"


class NoTokenAllowed(RowError):
    """Every token of the vocabulary is masked."""

    code = "no_token_allowed"


class TrimError(RowError):
    """Fewer positions were given back than the row had to give back."""

    code = "trim"


class RewindError(RowError):
    """Positions that cannot be taken back with exact bits."""

    code = "rewind"
