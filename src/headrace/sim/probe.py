"""Looks prefixes up from outside and compares with what must be found: no less than is there, and nothing else.

The expected length comes from the announced hashes by trying every boundary. Must not change anything in the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from headrace.base.ids import NULL_BLOCK, BlockId, RequestId
from headrace.kv.coordinator import KvCoordinator
from headrace.kv.prefix_hash import extras_of
from headrace.kv.sequence import Hit
from headrace.sched.request import Request
from headrace.sim.cells import Cells, GroupShape, SimFault, demand
from headrace.sim.observer import Record
from headrace.types.token_ids import token_array


class HitProbe:
    """Probes of one core."""

    def __init__(self, kv: KvCoordinator, cells: Cells, announced: Sequence[Set[bytes]]) -> None:
        """Keep what is compared.

        Args:
            kv: is asked.
            cells: what lies in the blocks.
            announced: per group, the hashes that can be hit, as events tell it.
        """
        self._kv = kv
        self._cells = cells
        self._announced = announced
        self._keeps_all = any(shape.kind in ("full", "latent") for shape in cells.shapes)

    def look_up(self, record: Record) -> int:
        """Look a request's tokens up, and judge the hit.

        Returns:
            Its length.

        Raises:
            SimFault: it is too short, too long, or made of wrong blocks.
        """
        source = record.source
        token_ids = token_array([*source.prompt_token_ids, *record.output_ids])
        sequence = self._kv.new_sequence(
            extras=extras_of(source), prompt_tokens=len(source.prompt_token_ids), encoder_tokens=source.encoder_tokens
        )
        hit = self._kv.find_hit(sequence, token_ids)
        if not sequence.cacheable:
            demand(hit.tokens == 0, f"{source.request_id} has no hash of its own and a hit of {hit.tokens} tokens")
            return 0
        unit, hashes = self._kv.hash_tokens, sequence.hashes
        ends = range((len(token_ids) - 1) // unit * unit, 0, -unit)
        least = next((end for end in ends if self._all_have(end, hashes, strict=True)), 0)
        most = next((end for end in ends if self._all_have(end, hashes, strict=False)), 0)
        good = least <= hit.tokens <= most
        demand(good, f"{source.request_id} finds {hit.tokens} tokens, {least} to {most} are there")
        self._check_boundary(hit, hashes, ends)
        if hit.tokens:
            self._check_blocks(hit, record)
        return hit.tokens

    def check_published(self, running: Sequence[Request], began: Mapping[RequestId, int]) -> None:
        """What a running request has computed since it started can be hit, as long as its blocks are there.

        Args:
            running: requests.
            began: computed tokens with which each of them started.
        """
        unit = self._kv.hash_tokens
        for request in running:
            kv = request.kv
            if not kv.cacheable or request.request_id not in began:
                continue
            units = range(-(-began[request.request_id] // unit), request.computed_tokens // unit)
            for shape in self._cells.shapes:
                if not shape.is_read_behind(unit):
                    continue
                table, hashes = kv.tables[shape.group], self._announced[shape.group]
                for place in units:
                    if table[place * unit // shape.block_tokens] != NULL_BLOCK and kv.hashes[place] not in hashes:
                        raise SimFault(
                            f"{request.request_id} has {(place + 1) * unit} tokens, group {shape.group} finds less"
                        )

    def check_common(self, running: Sequence[Request]) -> None:
        """The blocks that all running requests share are those at which their tables agree, from the first on."""
        told = self._kv.common_prefix([request.kv for request in running])
        for shape, count in zip(self._cells.shapes, told, strict=True):
            tables = [request.kv.tables[shape.group] for request in running]
            places = min((len(table) for table in tables), default=0) if shape.by_token else 0
            same = next((place for place in range(places) if len({table[place] for table in tables}) > 1), places)
            demand(count == same, f"group {shape.group} shares {count} blocks, the tables agree in {same}")

    def _all_have(self, end: int, hashes: Sequence[bytes], *, strict: bool, states: bool = True) -> bool:
        return all(
            self._has(shape, end, hashes, strict=strict)
            for shape in self._cells.shapes
            if states or shape.kind != "recurrent"
        )

    def _has(self, shape: GroupShape, end: int, hashes: Sequence[bytes], *, strict: bool) -> bool:
        """Return whether a group has all that a resume at ``end`` reads.

        Args:
            shape: of the group.
            end: a boundary of hash units.
            hashes: of the sequence.
            strict: only what is published for exactly this end counts; else also what is published further on in the
                same block, of which a longer hit that is cut may make use.
        """
        if shape.kind == "cross":
            return True
        unit, there = self._kv.hash_tokens, self._announced[shape.group]
        if shape.kind == "recurrent":
            return hashes[end // unit - 1] in there
        size, first = shape.block_tokens, shape.first_read(end)
        if first >= end:
            return True
        for index in range(first // size, end // size):
            if hashes[(index + 1) * size // unit - 1] not in there:
                return False
        start = end // size * size
        needed = end // shape.ratio_tokens * shape.ratio_tokens
        if needed <= start:
            return True
        # A boundary behind the last complete record says as much about it as one at its end.
        behind = end if strict else min(start + size, len(hashes) * unit)
        return any(hashes[at // unit - 1] in there for at in range(-(-needed // unit) * unit, behind + 1, unit))

    def _check_boundary(self, hit: Hit, hashes: Sequence[bytes], ends: Sequence[int]) -> None:
        """The next one with this beginning would profit from a checkpoint where all groups meet but the states."""
        if not self._keeps_all or not any(shape.kind == "recurrent" for shape in self._cells.shapes):
            return
        least = next((end for end in ends if self._all_have(end, hashes, strict=True, states=False)), 0)
        most = next((end for end in ends if self._all_have(end, hashes, strict=False, states=False)), 0)
        told = hit.shared_boundary_tokens or hit.tokens
        demand(least <= told <= most, f"a shared boundary at {told} tokens, there are {least} to {most}")

    def _check_blocks(self, hit: Hit, record: Record) -> None:
        contents = record.contents(hit.tokens)
        for shape, part in zip(self._cells.shapes, hit.parts, strict=True):
            if shape.kind == "cross":
                continue
            if shape.kind == "recurrent":
                cells = None if part.tail is None else self._cells.blocks[shape.group].get(part.tail)
                good = cells is not None and cells[0] == contents[-1]
                demand(good, f"a hit of {hit.tokens} tokens with the state in block {part.tail}, which is another one")
                continue
            table: list[BlockId] = part.table if part.tail is None else [*part.table, part.tail]
            first = shape.first_read(hit.tokens)
            records_end = hit.tokens // shape.ratio_tokens * shape.ratio_tokens
            if first >= records_end:
                continue
            if len(table) * shape.block_tokens < records_end:
                raise SimFault(f"a hit of {hit.tokens} tokens with {len(table)} blocks of group {shape.group}")
            wrong = self._cells.wrong_cell(shape.group, table, first, hit.tokens, contents)
            demand(wrong is None, f"a hit of {hit.tokens} tokens is wrong in group {shape.group}: {wrong}")
