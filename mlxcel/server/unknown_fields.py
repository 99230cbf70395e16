"""Fields of requests that nobody here knows: ignored, and said once (docs/spec/clients.md 3.4)."""

from __future__ import annotations

import logging
from typing import Final

from mlxcel.errors import shown
from mlxcel.server.access_log import escaped

log = logging.getLogger("mlxcel.server")

MOST_NAMES: Final = 100
"""Names that are logged in the life of a server."""


class UnknownFields:
    """`count` is how many there were, whatever their names."""

    def __init__(self) -> None:
        self.count = 0
        self._named: set[str] = set()

    def ignored(self, name: str, route: str) -> None:
        """One of them, on the event loop."""
        self.count += 1
        name = name[:64]
        if name not in self._named and len(self._named) < MOST_NAMES:
            self._named.add(name)
            log.warning(
                "%s: the field %s is not known, and ignored; --strict refuses such", escaped(route), shown(name)
            )
