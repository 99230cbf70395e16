"""Which pages hold the KV of which ids: a tree of pages under a root for each key space (spec X2 to X4).

Hashes only find candidates; what a page is for is compared id by id. So with any hash, a constant too, all answers stay
right. The oldest node of `by_age` has no children: a path is touched from its end to its root.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from mlxcel.core.prefix import KVKey, StatePayload


def blake2b(data: bytes) -> bytes:
    """BLAKE2b-256."""
    return hashlib.blake2b(data, digest_size=32).digest()


@attrs.define(eq=False)
class Node:
    """One page of one chain. `ids` are those of its page, fewer than fill it in a leaf; `end` is the length of the
    chain up to and with it."""

    ids: np.ndarray  # int32 [n]
    raw: bytes  # the same, little-endian uint32
    page: int
    parent: Node | None  # None: a root, which has neither ids nor page
    digest: bytes
    end: int = 0
    prefilled: int = 0  # of its ids, from the first: computed by pieces of plans
    used: float = 0.0  # on the injected clock
    payload: StatePayload | None = None
    payload_length: int = 0  # positions that the payload is behind
    children: dict[int, list[Node]] = attrs.field(factory=dict)  # by their first id
    carriers: list[Node] = attrs.field(factory=list)  # this node and those below it that have a payload

    def path(self) -> list[Node]:
        """From the first page to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@attrs.frozen(eq=False)
class Walk:
    """How far ids go down the tree: the nodes passed, the last one perhaps only in part, and the ids that agree."""

    nodes: tuple[Node, ...]
    length: int


class PrefixIndex:
    """Chains of pages of `page_size` positions. It names pages and holds none: the caller does what it returns."""

    def __init__(self, page_size: int, digest: Callable[[bytes], bytes] = blake2b) -> None:
        self._page_size = page_size
        self._digest = digest
        self._roots: dict[KVKey, Node] = {}
        self._full: dict[bytes, list[Node]] = {}
        self.by_age: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self.entries = 0  # nodes without children
        self.payload_bytes = 0

    def holds(self, key: KVKey) -> bool:
        """Whether anything is there in this key space."""
        return key in self._roots

    def key_of(self, node: Node) -> KVKey:
        """The key space that a node is in."""
        root = node
        while root.parent is not None:
            root = root.parent
        return next(key for key, each in self._roots.items() if each is root)

    def walk(self, key: KVKey, ids: np.ndarray) -> Walk:
        """Of int32 ids [P], as many as are there. Linear in P."""
        current = self._roots.get(key)
        if current is None:
            return Walk((), 0)
        nodes: list[Node] = []
        at, raw = 0, _raw(ids)
        while at < len(ids):
            end = at + self._page_size
            node = self._child(current, raw[4 * at : 4 * end]) if end <= len(ids) else None
            if node is None:
                node, agreed = self._closest(current, ids[at:end])
                if node is not None:
                    nodes.append(node)
                    at += agreed
                break
            nodes.append(node)
            at += self._page_size
            current = node
        return Walk(tuple(nodes), at)

    def insert(
        self,
        key: KVKey,
        ids: np.ndarray,
        pages: Sequence[int],
        *,
        prefilled: int,
        payload: StatePayload | None,
        now: float,
    ) -> tuple[Node, list[int]]:
        """Add int32 ids [n], n >= 1, with the pages they are on; nodes that are there already stay (spec X11). Returns
        the last node and the pages that are not needed: of `pages`, and of shorter leaves that this chain covers."""
        current = self._root(key)
        spare: list[int] = []
        for place, page in enumerate(pages):
            begin = place * self._page_size
            chunk = ids[begin : begin + self._page_size]
            if (known := self._covering(current, chunk)) is not None:
                spare.append(page)
                current = known
                continue
            covered = self._covered(current, chunk)
            current = self._add(current, chunk, page, begin, prefilled)
            spare += [self.remove(leaf) for leaf in covered]
        if payload is not None and current.payload is None:
            current.payload, current.payload_length = payload, len(ids)
            self.payload_bytes += payload.nbytes
            for node in current.path():
                node.carriers.append(current)
        self.touch(current, now)
        return current, spare

    def touch(self, node: Node, now: float) -> None:
        """The chain that ends with `node` was used."""
        for each in reversed(node.path()):
            each.used = now
            self.by_age.move_to_end(each)

    def remove(self, node: Node) -> int:
        """Forget a node without children; its page, which the caller gives back. ValueError for any other."""
        if node.children:
            raise ValueError(f"a node of {len(node.children)} children is not removed before them")
        parent = node.parent
        if parent is None:
            raise ValueError("a root has no page")
        self.drop_payload(node)
        first = int(node.ids[0])
        siblings = parent.children[first]
        siblings.remove(node)
        if not siblings:
            del parent.children[first]
        if len(node.ids) == self._page_size:
            same = self._full[node.digest]
            same.remove(node)
            if not same:
                del self._full[node.digest]
        del self.by_age[node]
        self.entries -= 1
        if parent.parent is not None:
            self.entries += not parent.children
        elif not parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not parent}
        return node.page

    def drop_payload(self, node: Node) -> None:
        """The copy of its rings is no longer kept. Harmless where there is none."""
        if node.payload is None:
            return
        self.payload_bytes -= node.payload.nbytes
        node.payload, node.payload_length = None, 0
        for each in node.path():
            each.carriers.remove(node)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _root(self, key: KVKey) -> Node:
        if key not in self._roots:
            self._roots[key] = Node(np.zeros(0, np.int32), b"", -1, None, self._digest(key.root()))
        return self._roots[key]

    def _child(self, parent: Node, raw: bytes) -> Node | None:
        """The full page behind `parent` for just these ids. h_i = BLAKE2b-256(h_{i-1} || ids of page i)."""
        for node in self._full.get(self._digest(parent.digest + raw), ()):
            if node.parent is parent and node.raw == raw:
                return node
        return None

    def _closest(self, parent: Node, chunk: np.ndarray) -> tuple[Node | None, int]:
        """The page behind `parent` that has most ids with the beginning of `chunk` in common, and how many."""
        best, most = None, 0
        for node in parent.children.get(int(chunk[0]), ()):
            if (agreed := _common(node.ids, chunk)) > most:
                best, most = node, agreed
        return best, most

    def _covering(self, parent: Node, chunk: np.ndarray) -> Node | None:
        """A page behind `parent` that begins with all of `chunk`."""
        if len(chunk) == self._page_size:
            return self._child(parent, _raw(chunk))
        node, agreed = self._closest(parent, chunk)
        return node if agreed == len(chunk) else None

    def _covered(self, parent: Node, chunk: np.ndarray) -> list[Node]:
        """Leaves behind `parent` whose ids `chunk` begins with."""
        return [
            node
            for node in parent.children.get(int(chunk[0]), ())
            if len(node.ids) < len(chunk) and _common(node.ids, chunk) == len(node.ids)
        ]

    def _add(self, parent: Node, chunk: np.ndarray, page: int, begin: int, prefilled: int) -> Node:
        full = len(chunk) == self._page_size
        raw = _raw(chunk)
        node = Node(
            ids=chunk,
            raw=raw,
            page=page,
            parent=parent,
            digest=self._digest(parent.digest + raw) if full else b"",
            end=begin + len(chunk),
            prefilled=min(max(prefilled - begin, 0), len(chunk)),
        )
        if full:
            self._full.setdefault(node.digest, []).append(node)
        self.entries += 1 - (parent.parent is not None and not parent.children)
        parent.children.setdefault(int(chunk[0]), []).append(node)
        self.by_age[node] = None
        return node


def _raw(ids: np.ndarray) -> bytes:
    """int32 ids as little-endian uint32."""
    return np.ascontiguousarray(ids, "<u4").tobytes()


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """How many ids two beginnings have in common."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
