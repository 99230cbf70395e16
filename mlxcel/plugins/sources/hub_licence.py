"""What the card of a repository at Hugging Face says of its licence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import attrs

from mlxcel.store.hub_name import HubName

UNKNOWN: Final = "unknown"
_LONGEST: Final = 64  # characters of a licence's name
_OPEN: Final = frozenset((
    "afl-3.0", "apache-2.0", "artistic-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc-by-4.0", "cc0-1.0",
    "ecl-2.0", "epl-2.0", "isc", "mit", "mpl-2.0", "ms-pl", "ncsa", "postgresql", "unlicense", "wtfpl", "zlib",
))  # fmt: skip
"""Licences, by the hub's names for them, that ask nothing of who uses a model."""


@attrs.frozen
class Licence:
    """`name` for people, `is_open` where there is nothing to tell, `link` to the terms where the card has one."""

    name: str
    is_open: bool
    link: str | None

    @classmethod
    def of_card(cls, card: Mapping[str, Any]) -> Licence:
        """From "license" (a name or a list of names), "license_name" (where that is "other") and "license_link"."""
        given = card.get("license")
        names = [name for name in (given if isinstance(given, list) else [given]) if _is_word(name)]
        own = card.get("license_name")
        name = own if names == ["other"] and _is_word(own) else ", ".join(names)[:_LONGEST]
        link = card.get("license_link")
        usable = isinstance(link, str) and link.startswith("https://") and link.isprintable() and " " not in link
        return cls(name or UNKNOWN, bool(names) and _OPEN.issuperset(names), link if usable else None)

    def notice(self, name: HubName) -> str | None:
        """The line that is told before the model is fetched."""
        if self.is_open:
            return None
        terms = self.link or f"the card of {name.repository}"
        if self.name == UNKNOWN:
            return f"{name.text} names no licence: {terms} may say what it may be used for"
        return (
            f"{name.text} is under the licence {self.name}, which may restrict what it is used for: see {terms}; "
            "using the model accepts its terms"
        )


def _is_word(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST and value.isprintable()
