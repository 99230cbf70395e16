"""What of a walk down the index a row may begin with: the length A, and why it is not more (spec X6, X15, V15)."""

from __future__ import annotations

import numpy as np

from mlxcel.core.prefix import DetachedKV, KVKey, Reject, StatePayload
from mlxcel.core.prompt_cache import Match
from mlxcel.plugins.kv.prefix_index import Node, Walk


def usable(
    walk: Walk, key: KVKey, *, limit: int, granule: int, min_prefix: int, windowed: bool, epoch: int
) -> tuple[Match, Node | None]:
    """At most `limit` = P - 1 positions, a multiple of `granule`; with `windowed` only as far as a copy of the rings
    goes. Second: the node that was used, for the order of age. A granule above 1 is that of R1, where decoded positions
    are not taken."""
    if not walk.length:
        return Match(reject=Reject.NO_MATCH), None
    if walk.length < min_prefix:
        return Match(reject=Reject.PREFIX_TOO_SHORT), None
    length = min(walk.length, limit) // granule * granule
    if length < 1:
        return Match(reject=Reject.GRANULE_FLOOR), None
    prefilled = _prefilled(walk.nodes, length)
    if granule > 1 and prefilled < length:
        length = prefilled // granule * granule
        if not length:
            return Match(reject=Reject.DECODED_POSITIONS), None
    carrier: Node | None = None
    if windowed:
        length, carrier = _within_rings(walk.nodes, length, granule)
        if carrier is None:
            return Match(reject=Reject.LAYOUT_CONSTRAINTS), None
    if length < min_prefix:
        return Match(reject=Reject.PREFIX_TOO_SHORT), None
    nodes = _up_to(walk.nodes, length)
    payload: StatePayload | None = None if carrier is None else carrier.payload
    prefix = DetachedKV(
        ids=np.concatenate([node.ids for node in nodes])[:length],
        key=key,
        pages=tuple(node.page for node in nodes),
        prefilled=min(prefilled, length),
        epoch=epoch,
        payload=payload,
    )
    return Match(length, prefix, prefilled=prefilled >= length), carrier or nodes[-1]


def _up_to(nodes: tuple[Node, ...], length: int) -> list[Node]:
    """Those that the first `length` positions are on."""
    return [node for node in nodes if node.end - len(node.ids) < length]


def _prefilled(nodes: tuple[Node, ...], length: int) -> int:
    """Of the first `length` positions, how many from 0 on were computed by pieces."""
    total = 0
    for node in _up_to(nodes, length):
        total += node.prefilled
        if node.prefilled < len(node.ids):
            break
    return min(total, length)


def _within_rings(nodes: tuple[Node, ...], length: int, granule: int) -> tuple[int, Node | None]:
    """The most positions, up to `length`, behind which some copy of rings still holds all that is seen, and the node
    that has the copy."""
    for node in reversed(_up_to(nodes, length)):
        here = min(length, node.end)
        best, chosen = 0, None
        for carrier in node.carriers:
            reached = min(here, carrier.payload_length) // granule * granule
            if carrier.payload is not None and carrier.payload.reach <= reached and reached > best:
                best, chosen = reached, carrier
        if chosen is not None:
            return best, chosen
    return 0, None
