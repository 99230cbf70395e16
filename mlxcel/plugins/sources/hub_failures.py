"""Each failure of asking Hugging Face with its own sentence and next step."""

from __future__ import annotations

from typing import Final

import attrs

from mlxcel.errors import DownloadError, MlxcelError, UnknownModel
from mlxcel.store.hub_name import HubName

_SIGN_IN: Final = "sign in with `hf auth login`"


@attrs.frozen
class _Told:
    """In `message` and `hint`, {name}, {repository}, {revision} and the library's own {words} are filled in."""

    message: str
    hint: str
    kind: type[MlxcelError] = DownloadError


_FAILURES: Final = {
    "missing": _Told(
        "{name!r} is no path here, and Hugging Face has no model {repository}, or not for everybody",
        f"check the spelling; for a private model, {_SIGN_IN}",
        UnknownModel,
    ),
    "revision": _Told(
        "{repository} has no revision {revision!r}",
        "name a branch, a tag or a commit that it has; without one its main branch is taken",
        UnknownModel,
    ),
    "entry": _Told("{repository} lacks a file that it lists: {words}", "try again: it may be changing just now"),
    "gated": _Told(
        "{repository} is gated: its owner gives it to those who ask",
        f"ask for access on the model's own page, then {_SIGN_IN}",
    ),
    "rate": _Told(
        "Hugging Face takes no more questions for now (rate limit): {words}",
        f"wait some minutes; {_SIGN_IN} for a higher limit",
    ),
    "offline": _Told(
        "{name} is not in the model store, and HF_HUB_OFFLINE forbids asking for it",
        "unset HF_HUB_OFFLINE; or name a model of your own with -m PATH",
    ),
    "network": _Told(
        "{name!r} is no path here, and Hugging Face cannot be reached: {words}",
        "look at your network and its proxy settings, and at HF_ENDPOINT where it is set",
    ),
    "server": _Told("Hugging Face fails to answer: {words}", "try again later"),
    "full": _Told("the disk of the model store is full", "free some of it and try again"),
    "stalled": _Told("{name}: {words}", "look at your network and try again"),
    "absent": _Told(
        "models of Hugging Face are fetched by its library, and this Python has none", "pip install huggingface-hub"
    ),
    "other": _Told("{name} could not be fetched: {words}", "try again"),
}


def failure(kind: str, words: str, name: HubName) -> MlxcelError:
    """`kind` as hub_child.py tells it, or "stalled"; `words` the library's own."""
    told = _FAILURES[kind]
    facts = {"name": name.text, "repository": name.repository, "revision": name.revision, "words": words}
    return told.kind(told.message.format(**facts), hint=told.hint)
