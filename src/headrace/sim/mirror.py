"""Follows the cache events as a router would, and knows which content each hash stands for.

Must not look at requests: what an event does not say, a consumer does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.base.ids import BlockId
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.events import AllBlocksCleared, BlockStored, KvEvent
from headrace.kv.pool import BlockPool
from headrace.kv.prefix_hash import ExtraKey, ExtraKind
from headrace.sim.cells import Cells, GroupShape, SimFault, demand
from headrace.sim.oracle import number_of, root_content, span_mark, span_tokens


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """What one hash stands for.

    Attributes:
        tokens: length of the prefix.
        contents: of the last unit's positions.
        said: (parent, tokens, extra keys) of its event: a hash must never be announced with others.
    """

    tokens: int
    contents: tuple[int, ...]
    said: tuple[object, ...]


class CacheMirror:
    """The set of (group, hash) that can be hit, as events tell it.

    Attributes:
        hashes: per group, what can be hit.
        known: what each hash ever announced stands for.
    """

    def __init__(self, num_groups: int, content_at: Callable[[bytes], tuple[int, int] | None]) -> None:
        """Begin with nothing.

        Args:
            num_groups: groups of the layout.
            content_at: (tokens, content) of a prefix that was never announced, as its computing request has it: a
                checkpoint may stand alone, without any of its parents.
        """
        self.hashes: list[set[bytes]] = [set() for _ in range(num_groups)]
        self.known: dict[bytes, KnownPrefix] = {}
        self._content_at = content_at

    def take(self, events: Sequence[KvEvent]) -> list[BlockStored]:
        """Follow the events, in order; return what was stored and is still there."""
        stored: dict[tuple[int, bytes], BlockStored] = {}
        for event in events:
            hashes = self.hashes[event.group]
            if isinstance(event, AllBlocksCleared):
                hashes.clear()
            elif isinstance(event, BlockStored):
                demand(event.block_hash not in hashes, "a hash is announced twice")
                hashes.add(event.block_hash)
                self._learn(event)
                stored[event.group, event.block_hash] = event
            else:
                demand(event.block_hash in hashes, "a hash is removed that nobody announced")
                hashes.discard(event.block_hash)
        return [event for (group, block_hash), event in stored.items() if block_hash in self.hashes[group]]

    def _learn(self, event: BlockStored) -> None:
        said = (event.parent_hash, tuple(event.token_ids), tuple(event.extras))
        known = self.known.get(event.block_hash)
        if known is not None:
            demand(known.said == said, f"one hash stands for {known.said} and for {said}")
            return
        demand(len(event.token_ids) == event.block_tokens > 0, "an event with too few tokens")
        start, content = self._parent(event)
        if start == 0:
            content = _root_of(event.extras)
        marks = _marks_of(event.extras, len(event.token_ids))
        contents: list[int] = []
        for offset, token_id in enumerate(event.token_ids):
            content = hash((content, hash((token_id, marks[offset])) if offset in marks else token_id))
            contents.append(content)
        self.known[event.block_hash] = KnownPrefix(start + len(contents), tuple(contents), said)

    def _parent(self, event: BlockStored) -> tuple[int, int]:
        if event.parent_hash is None:
            return 0, 0
        parent = self.known.get(event.parent_hash)
        if parent is not None:
            return parent.tokens, parent.contents[-1]
        computed = self._content_at(event.parent_hash)
        if computed is None:
            raise SimFault("the parent of a stored unit is nobody's")
        return computed

    def check_contents(self, kv: KvCoordinator, cells: Cells, stored: Sequence[BlockStored]) -> None:
        """Every unit that was stored is right on the device, in the block that would be hit."""
        for event in stored:
            pool = kv.memory.pools[event.group]
            block = pool.find(event.block_hash)
            if block is None:
                raise SimFault(f"group {event.group} announces a hash that it does not find")
            self._check_unit(cells, cells.shapes[event.group], block, event.block_hash)

    def check_all(self, kv: KvCoordinator, cells: Cells) -> None:
        """Replayed events equal the pools, a snapshot equals both, and each published block is right."""
        snapshot: list[set[bytes]] = [set() for _ in self.hashes]
        for event in kv.snapshot():
            demand(event.block_hash not in snapshot[event.group], "a snapshot tells a hash twice")
            snapshot[event.group].add(event.block_hash)
        for group, pool in enumerate(kv.memory.pools):
            demand(self.hashes[group] == pool.cached_hashes(), f"group {group}: replayed events differ from the pool")
            demand(self.hashes[group] == snapshot[group], f"group {group}: the snapshot differs from the events")
            for block in pool.block_ids():
                for block_hash in pool.hashes_of(block):
                    self._check_unit(cells, cells.shapes[group], block, block_hash)

    def published_cells(self, pool: BlockPool, shape: GroupShape, block: BlockId) -> int:
        """Return how many cells of a block, from its first, can be hit by others."""
        hashes = pool.hashes_of(block)
        if not hashes:
            return 0
        if not shape.block_tokens:
            return 1
        tokens = self.known[hashes[-1]].tokens
        return ((tokens - 1) % shape.block_tokens + 1) // shape.ratio_tokens

    def _check_unit(self, cells: Cells, shape: GroupShape, block: BlockId, block_hash: bytes) -> None:
        known = self.known[block_hash]
        found = cells.blocks[shape.group].get(block)
        if shape.kind == "recurrent":
            good = found is not None and found[0] == known.contents[-1]
            demand(good, f"the checkpoint in block {block} of group {shape.group} is not after {known.tokens} tokens")
            return
        ratio = shape.ratio_tokens
        start = known.tokens - len(known.contents)
        for position in range(start + (-start - 1) % ratio, known.tokens, ratio):
            place = position % shape.block_tokens // ratio
            if found is None or found[place] != known.contents[position - start]:
                raise SimFault(
                    f"block {block} of group {shape.group} ({shape.kind}) is published for {known.tokens} tokens, and "
                    f"position {position} is {None if found is None else found[place]}"
                )


def _root_of(extras: Sequence[ExtraKey]) -> int:
    values = {key.kind: key.value for key in extras}
    salt, adapter = values.get(ExtraKind.SALT), values.get(ExtraKind.ADAPTER)
    encoder = values.get(ExtraKind.ENCODER)
    return root_content(
        None if salt is None else salt.decode(), adapter, None if encoder is None else number_of("encoder", encoder)
    )


def _marks_of(extras: Sequence[ExtraKey], tokens: int) -> dict[int, int]:
    """Return the marks of a unit's positions; media come before embeddings, as in the oracle."""
    marks: dict[int, int] = {}
    for kind, name in ((ExtraKind.MEDIA, "media"), (ExtraKind.EMBEDS, "embeds")):
        for key in extras:
            if key.kind != kind:
                continue
            for offset in range(span_tokens(key.value)):
                place = key.offset_tokens + offset
                if 0 <= place < tokens:
                    mark = span_mark(name, key.value, offset)
                    marks[place] = mark if name == "media" else hash((marks.get(place, 0), mark))
    return marks
