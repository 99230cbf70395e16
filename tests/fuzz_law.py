"""Runs damaged files through everything that reads a checkpoint, in a process of its own, and tells what broke the law.

The law: opening, the family's config, tokenizer, template, end ids and one small read each end in success or in an
MlxcelError. Never another exception or a warning; never more CPU time than SECONDS; never more memory than FLOOR and
FACTOR times the files. The operating system keeps watch: an address space that may not grow further, and a timer of CPU
time whose signal ends the process, in whatever library it is then.

    python tests/fuzz_law.py FIRST COUNT FOLDER       cases FIRST to FIRST + COUNT; one JSON record on stdout
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from fuzz_seeds import Seed, Seeds, make_seeds

from mlxcel.errors import MlxcelError
from mlxcel.load import choose_tokenizer, open_checkpoint
from mlxcel.plugins.manager import PluginManager
from mlxcel.text.chat_template import select_template
from mlxcel.text.end_ids import end_ids
from mlxcel.text.generation_config import GenerationDefaults

FACTOR: Final = 4
FLOOR: Final = 12 << 20
"""Bytes of address space. Parsed JSON and compiled patterns are many times their text; the files have 20 to 100 kB."""

SECONDS: Final = 30
"""CPU time of one case, a thousand times what the slowest undamaged one needs."""

READ_BY_TOKENIZER: Final = (".gguf", ".model", ".jinja", "tokenizer.json", "_config.json", "_map.json")
STATUS: Final = "case"

Use = Callable[[Path, Random, bool], set[str]]


class FormatsEveryRecord(logging.Handler):
    """A log line must be writable, whatever the damaged value in it is."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage().encode("utf-8", "backslashreplace")


class Chain:
    """Everything between a path and a model, stage by stage. Called with a path it returns the stages that refused."""

    def __init__(self) -> None:
        self._manager = PluginManager.load(only=(), trace=None)

    def __call__(self, path: Path, draw: Random, all_of_it: bool) -> set[str]:
        try:
            checkpoint = open_checkpoint(path, self._manager)
        except MlxcelError as error:
            refuse_hidden(error)
            return {"open"}
        stages = [self._config, self._read, *([self._tokenizer, self._template, self._ends] if all_of_it else ())]
        refused = set()
        for stage in stages:
            try:
                stage(checkpoint, draw)
            except MlxcelError as error:
                refuse_hidden(error)
                refused.add(stage.__name__.strip("_"))
        checkpoint.close()
        return refused

    def _config(self, checkpoint: Any, draw: Random) -> None:
        spec = self._manager.family_for(checkpoint.naming, checkpoint.architecture)
        family = self._manager.families().load(spec.name)()
        config = family.parse_config(checkpoint)
        family.schema(config)
        family.kv_spec(config)
        family.eos_ids(config)

    def _read(self, checkpoint: Any, draw: Random) -> None:
        small = [name for name, info in checkpoint.tensors.items() if info.size <= 4096]
        if small:
            name = draw.choice(small)
            assert checkpoint.read(name).shape == checkpoint.tensors[name].shape

    def _tokenizer(self, checkpoint: Any, draw: Random) -> None:
        tokenizer = choose_tokenizer(checkpoint, self._manager)
        ids = tokenizer.encode("Hi <s> the 1!é", add_special=True, parse_special=draw.random() < 0.8)
        tokenizer.decode([*ids, 0, 5, tokenizer.size - 1, tokenizer.size, 2**40], skip_special=draw.random() < 0.5)
        for token_id in (*ids[:2], 0, tokenizer.size - 1, tokenizer.size):
            tokenizer.token_bytes(token_id)
            tokenizer.token_text(token_id).encode()
            tokenizer.is_special(token_id)

    def _template(self, checkpoint: Any, draw: Random) -> None:
        template = select_template(checkpoint)
        if template is not None:
            template.check()

    def _ends(self, checkpoint: Any, draw: Random) -> None:
        defaults = GenerationDefaults.read("auto", checkpoint)
        config = checkpoint.config if checkpoint.naming == "hf" else {}
        end_ids(config, defaults, choose_tokenizer(checkpoint, self._manager) if draw.random() < 0.1 else None, (), 288)


def refuse_hidden(error: BaseException) -> None:
    """A refusal in the user's words may not stand for memory that was not to be had."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError):
            raise seen
        str(error)
        seen = seen.__cause__ or seen.__context__


# --- one process -----------------------------------------------------------------------------------------------------


def run(first: int, count: int, folder: Path, use: Use) -> dict[str, Any]:
    """A record: how many cases were read whole, how many stages refused, and the first few that broke the law."""
    logging.getLogger().addHandler(FormatsEveryRecord())
    logging.getLogger().setLevel(logging.DEBUG)
    seeds = make_seeds(folder / "seeds")
    for seed in seeds.all:
        lay_out(seed, folder / seed.name)
        use(folder / seed.name / seed.opened, Random(0), True)  # what is imported or compiled once
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)
    counts: Counter[str] = Counter()
    broken: dict[str, dict[str, Any]] = {}  # the first of each kind
    with (folder / STATUS).open("wb", buffering=0) as status:
        for case in range(first, first + count):
            os.pwrite(status.fileno(), b"%20d" % case, 0)
            refused, wrong = one(case, seeds, folder, use)
            counts.update(refused or ("whole",) if wrong is None else ())
            if wrong is not None:
                counts["broken"] += 1
                broken.setdefault(wrong["kind"], wrong)
    return {"counts": dict(counts), "broken": list(broken.values())}


def one(case: int, seeds: Seeds, folder: Path, use: Use) -> tuple[set[str], dict[str, Any] | None]:
    """The refusing stages of a case, and what broke the law."""
    draw = Random(case)
    seed = seeds.of(case, draw)
    place = folder / seed.name
    target, data = seed.damaged(draw)
    write_anew(place / target, data)
    size = sum(len(content) for content in ({**seed.files, target: data}).values())
    limit = address_space() + FLOOR + FACTOR * size
    wrong = None
    refused: set[str] = set()
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        refused = use(place / seed.opened, draw, target.endswith(READ_BY_TOKENIZER))
    except BaseException as error:  # what a library panics with is no Exception
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        wrong = {"case": case, "seed": seed.name, "file": target, **told(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    write_anew(place / target, seed.files[target])
    return refused, wrong


def told(error: BaseException) -> dict[str, str]:
    """`kind` is the same for errors of one type from one line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if "mlxcel" in Path(frame.filename).parts), frames[-1])
    where = "".join(traceback.format_exception(error))[-2000:]
    return {
        "kind": f"{type(error).__name__} {place.filename}:{place.lineno}",
        "error": repr(error)[:300],
        "where": where,
    }


def lay_out(seed: Seed, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, data in seed.files.items():
        write_anew(place / name, data)


def write_anew(path: Path, data: bytes) -> None:
    """Another file of the name: the old one may still be mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def address_space() -> int:
    """Bytes this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> None:
    first, count, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    record: Mapping[str, Any] = run(first, count, folder, Chain())
    print(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1:])
