"""Asks Hugging Face, by its own library, in a process of its own: `hub_child.py list|get REQUEST ANSWER`.

REQUEST and ANSWER are JSON files. Nothing of mlxcel is imported here. What the library does on its own (retries, its
cache, signals, threads) ends with this process, which the parent watches and ends when no byte comes.
"""

from __future__ import annotations

import errno
import json
import re
import sys
from importlib import import_module
from typing import Any, Final

TIMEOUT: Final = 20.0  # seconds without an answer to one question
FAILURES: Final = {
    "OfflineModeIsEnabled": "offline",
    "GatedRepoError": "gated",
    "RevisionNotFoundError": "revision",
    "RepositoryNotFoundError": "missing",
    "EntryNotFoundError": "entry",
}
STATUSES: Final = {401: "missing", 403: "gated", 404: "missing", 429: "rate"}
TRANSPORTS: Final = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})
_QUERY: Final = re.compile(r"[?][^\s'\")]*")
FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def main(command: str, request: str, answer: str) -> None:
    """Writes {"failure": None, ...} or {"failure": what kind, "words": the library's own}."""
    with open(request, encoding="utf-8") as stream:
        wanted = json.load(stream)
    try:
        found = {"failure": None, **{"list": list_files, "get": get_files}[command](wanted)}
    except Exception as error:
        found = {"failure": failure(error), "words": words(error)}
    with open(answer, "w", encoding="utf-8") as stream:
        json.dump(found, stream)


def list_files(wanted: dict[str, Any]) -> dict[str, Any]:
    """The commit of a revision, its files, and what its card says of the licence."""
    api = import_module("huggingface_hub").HfApi()
    info = api.model_info(wanted["repository"], revision=wanted["revision"], files_metadata=True, timeout=TIMEOUT)
    card = info.card_data.to_dict() if info.card_data is not None else {}
    files = [
        {
            "name": file.rfilename,
            "size": file.size or 0,
            "sha256": file.lfs.sha256 if file.lfs is not None else None,
            "blob": file.blob_id,
        }
        for file in info.siblings or []
    ]
    licence = {key: card.get(key) for key in ("license", "license_name", "license_link")}
    return {"commit": info.sha, "files": files, **licence}


def get_files(wanted: dict[str, Any]) -> dict[str, Any]:
    """Puts files of a commit into a folder."""
    library = import_module("huggingface_hub")
    import_module("huggingface_hub.utils").disable_progress_bars()
    for name in wanted["files"]:
        library.hf_hub_download(
            wanted["repository"],
            name,
            revision=wanted["commit"],
            local_dir=wanted["folder"],
            etag_timeout=TIMEOUT,
        )
    return {}


def failure(error: BaseException) -> str:
    """What kind of failure this is; the library wraps one error into another."""
    link: BaseException | None = error
    while link is not None:
        if (kind := _kind(link)) is not None:
            return kind
        link = link.__cause__ or link.__context__
    return "other"


def _kind(error: BaseException) -> str | None:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("huggingface_hub"):
        return "absent"
    for base in type(error).__mro__:
        if base.__name__ in FAILURES:
            return FAILURES[base.__name__]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return STATUSES.get(status, "server" if status >= 500 else None)
    if isinstance(error, OSError) and error.errno in FULL:
        return "full"
    transport = any(base.__module__.partition(".")[0] in TRANSPORTS for base in type(error).__mro__)
    return "network" if transport or isinstance(error, ConnectionError | TimeoutError) else None


def words(error: BaseException) -> str:
    """One line, without what follows "?" in an address: signatures stand there."""
    line = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {_QUERY.sub('', line)}"


if __name__ == "__main__":
    main(*sys.argv[1:])
