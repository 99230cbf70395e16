"""tokenizer.json as it is, by the `tokenizers` library; what it does not say comes from the files beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from mlxcel.errors import CheckpointError
from mlxcel.plugins.tokenizers.end_of_turn import end_roles
from mlxcel.plugins.tokenizers.library import LibraryTokenizer, spellings_by_id
from mlxcel.plugins.tokenizers.pieces import decoder_table

if TYPE_CHECKING:
    from mlxcel.core.checkpoint import Checkpoint

MAX_BYTES: Final = 1 << 28  # the largest known, of 262,144 tokens, has about 2**25
MAX_ID: Final = 1 << 22  # as many elements as the GGUF reader takes; the largest known vocabularies have about 2**18
ROLES: Final = ("bos", "eos", "unk", "pad")


def load(checkpoint: Checkpoint) -> LibraryTokenizer:
    """The tokenizer of a checkpoint whose assets have "tokenizer.json". Raises CheckpointError when it is damaged.

    Roles: tokenizer_config.json, then special_tokens_map.json; an id of generation_config.json fills a role that both
    leave open, and is then no end of the tokenizer's own. `add_bos_token` and `add_eos_token` of tokenizer_config.json
    are obeyed where they are true or false, else the post-processor of tokenizer.json decides.
    """
    library = read_library(checkpoint)
    settings = checkpoint.assets.get("tokenizer_config.json", {})
    spelled = role_spellings(settings, checkpoint.assets.get("special_tokens_map.json", {}))
    added = library.get_added_tokens_decoder()
    own = {role: index for role, spelling in spelled.items() if (index := library.token_to_id(spelling)) is not None}
    plain = [spelled[role] for role, index in own.items() if index not in added]
    if plain:  # a role makes an ordinary entry of the vocabulary a special token
        library.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in plain])
    refuse_far_ids(library, checkpoint.assets["tokenizer.json"])
    tokens = spellings_by_id(library)
    added = library.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    completed, ends = end_roles({tokens[index]: index for index in special}, own)
    with library_faults(checkpoint.assets["tokenizer.json"]):
        prefix, suffix = surrounding_ids(library)
    return LibraryTokenizer(
        library,
        tokens=tokens,
        special=special,
        special_ids={**generation_roles(checkpoint, len(tokens)), **completed},
        eos_ids=ends,
        prefix=obeying(settings.get("add_bos_token"), completed.get("bos"), prefix, 0),
        suffix=obeying(settings.get("add_eos_token"), completed.get("eos"), suffix, -1),
        table=None if library.decoder is None else decoder_table(library.decoder.__getstate__(), tokens, added),
    )


def read_library(checkpoint: Checkpoint) -> tokenizers.Tokenizer:
    path = checkpoint.assets["tokenizer.json"]
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, at most {MAX_BYTES} are taken")
        data = path.read_bytes()  # ours to open: the library takes no file name that is not UTF-8
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    with library_faults(path):
        return tokenizers.Tokenizer.from_buffer(data)


@contextmanager
def library_faults(path: Path) -> Iterator[None]:
    """CheckpointError for whatever the library raises: bare Exception, and panics, which are no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(
            f"{path} cannot be read: {str(error)[:300]}", hint="the file is damaged or incomplete: download it again"
        ) from error


def refuse_far_ids(library: tokenizers.Tokenizer, path: Path) -> None:
    """A table by id has a place for every id below the highest: one damaged number must not choose how much memory."""
    token, highest = max(library.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1], default=("", 0))
    if highest >= MAX_ID:
        raise CheckpointError(
            f"{path}: token {token[:80]!r} has the id {highest}, ids below {MAX_ID} are taken",
            hint="the file is damaged: download it again",
        )


def role_spellings(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Role to spelling, the first source that says it wins. A value is a string or an object with "content"."""
    spelled: dict[str, str] = {}
    for source in reversed(sources):
        for role in ROLES:
            value = source.get(f"{role}_token")
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                spelled[role] = text
    return spelled


def generation_roles(checkpoint: Checkpoint, size: int) -> dict[str, int]:
    """bos, eos and pad of generation_config.json, the first id of a list, as far as they are in the vocabulary."""
    settings = checkpoint.assets.get("generation_config.json", {})
    roles: dict[str, int] = {}
    for role in ("bos", "eos", "pad"):
        value = settings.get(f"{role}_token_id")
        first = value[0] if isinstance(value, list) and value else value
        if type(first) is int and 0 <= first < size:
            roles[role] = first
    return roles


def surrounding_ids(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts in front of and behind a text, found by encoding one."""
    for probe in ("a", "A", "0", "\n"):  # a vocabulary may lack a character, and then says nothing about places
        bare = library.encode(probe, add_special_tokens=False).ids
        full = library.encode(probe, add_special_tokens=True).ids
        if bare:
            places = range(len(full) - len(bare) + 1)
            start = next((place for place in places if full[place : place + len(bare)] == bare), len(full))
            return full[:start], full[start + len(bare) :]
    return [], []


def obeying(wanted: Any, token_id: int | None, around: Sequence[int], place: int) -> list[int]:
    """`around` with `token_id` at `place` (0 or -1) when `wanted` is true, without it there when it is false."""
    ids = list(around)
    has = bool(ids) and ids[place] == token_id
    if token_id is None or not isinstance(wanted, bool) or wanted == has:
        return ids
    if has:
        del ids[place]
    else:
        ids.insert(0 if place == 0 else len(ids), token_id)
    return ids
