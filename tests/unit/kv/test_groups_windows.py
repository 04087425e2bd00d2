import itertools

import pytest
from group_cases import filled, hashes, make
from kv_oracle import Spec, chunked, sliding

from headrace.kv.groups import CacheGroup, GroupHit


def read_at(spec: Spec, tokens: int) -> range:
    """Positions before ``tokens`` that a resume there reads: the definition, not the code's formula."""
    if hasattr(spec, "window_tokens"):
        return range(max(0, tokens - spec.window_tokens + 1), tokens)
    return range(tokens - tokens % spec.chunk_tokens, tokens)


SPECS = [sliding(1), sliding(2), sliding(4), sliding(5), sliding(6), sliding(9), sliding(100)]
SPECS += [chunked(2), chunked(4), chunked(5), chunked(6), chunked(8), chunked(12), chunked(100)]


@pytest.mark.parametrize("spec", SPECS)
def test_skippable_is_what_no_resume_reads(spec: Spec) -> None:
    group = make(spec)
    for tokens in range(60):
        reads = read_at(spec, tokens)
        assert group.skippable(tokens) == (reads[0] if reads else tokens)


@pytest.mark.parametrize(
    ("spec", "tokens", "first"),
    [(chunked(8), 13, 8), (chunked(8), 8, 8), (chunked(8), 7, 0), (sliding(4), 7, 4), (sliding(4), 2, 0)],
)
def test_skippable_vectors(spec: Spec, tokens: int, first: int) -> None:
    assert make(spec).skippable(tokens) == first


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("block_tokens", "unit"), [(2, 2), (4, 2), (4, 4), (4, 1), (6, 2)])
def test_hits_against_every_set_of_present_blocks(spec: Spec, block_tokens: int, unit: int) -> None:
    """The longest hit is the longest beginning whose reads all lie in blocks that are right up to them."""
    places, known = 4, hashes(unit, 4 * block_tokens)
    for missing in itertools.chain.from_iterable(itertools.combinations(range(places), n) for n in range(places + 1)):
        group = make(spec, block_tokens, unit)
        table = filled(group, unit, places * block_tokens - unit, without=missing)
        for most in range(0, places * block_tokens + 1, unit):
            hit = group.longest_hit(known, most)
            good = [
                tokens
                for tokens in range(0, most + 1, unit)
                if all(
                    position // block_tokens not in missing and position < places * block_tokens - unit
                    for position in read_at(spec, tokens)
                )
            ]
            assert hit.tokens == max(good), (missing, most)
            reads = read_at(spec, hit.tokens)
            needed = {position // block_tokens for position in reads}
            assert len(hit.table) == hit.tokens // block_tokens
            for place, block in enumerate(hit.table):
                assert block == (table[place] if place in needed else 0)
            inside = hit.tokens // block_tokens in needed
            assert hit.tail == (table[hit.tokens // block_tokens] if inside else None)


@pytest.mark.parametrize("spec", SPECS)
def test_a_block_is_freed_when_nobody_reads_it_any_more_and_not_before(spec: Spec) -> None:
    group = make(spec)
    table: list[int] = []
    owned = group.allocate(table, 6)
    first, free_at = 0, [group.free_at(place) for place in range(6)]
    for tokens in range(1, 25):
        first = group.free_behind(table, first, tokens)
        read = {position // 4 for later in range(tokens, 200) for position in [*read_at(spec, later), later]}
        kept = [place for place in range(6) if place in read]
        assert [place for place in range(6) if table[place]] == kept
        assert [place for place in range(6) if free_at[place] > tokens] == kept
        assert [group.pool.references(block) for block in owned] == [int(place in kept) for place in range(6)]
        assert first == (kept[0] if kept else 6)


def test_tokens_in_flight_do_not_free() -> None:
    # kv.md 9: window 128, blocks of 32, 158 tokens applied: position 158 still reads from 31.
    group = make(sliding(128), block_tokens=32)
    table: list[int] = []
    group.allocate(table, 5)
    assert group.free_behind(table, 0, 158) == 0
    assert group.free_behind(table, 0, 159) == 1
    assert table[0] == 0
    assert all(table[1:])


def test_chunk_vectors() -> None:
    # kv.md 3: chunk 8, block 4; at most 15 tokens: two nulls, then looked up; 16: four nulls, nothing looked up.
    group = make(chunked(8))
    table = filled(group, 4, 12)
    assert group.longest_hit(hashes(4, 12), 12) == GroupHit(12, [0, 0, table[2]])
    empty = make(chunked(8))
    assert empty.longest_hit(hashes(4, 16), 16) == GroupHit(16, [0, 0, 0, 0])
    assert empty.longest_hit(hashes(4, 16), 12) == GroupHit(8, [0, 0])


def test_a_short_run_counts_if_it_touches_the_start() -> None:
    group = make(sliding(100))
    table = filled(group, 4, 8)
    assert group.longest_hit(hashes(4, 16), 16) == GroupHit(8, table)
    other = make(sliding(100))
    filled(other, 4, 16, without=(0,))
    assert other.longest_hit(hashes(4, 16), 16) == GroupHit(0, [])


def test_a_shorter_hit_needs_other_blocks() -> None:
    group = make(sliding(5))
    table = filled(group, 4, 16)
    longer = group.longest_hit(hashes(4, 16), 16)
    assert longer == GroupHit(16, [0, 0, 0, table[3]])
    assert group.longest_hit(hashes(4, 16), 8, longer) == GroupHit(8, [0, table[1]])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("align", [4, 8, 16])
def test_reachable_is_what_some_allowed_hit_reads(spec: Spec, align: int) -> None:
    group = make(spec)
    for end in range(1, 40):
        ends = [*range(align, end + 1, align), end]
        for place in range(11):
            read = any(place in {position // 4 for position in read_at(spec, tokens)} for tokens in ends)
            assert group.reachable(place, end, align) == read, (end, place)


def test_reachable_vector() -> None:
    # kv.md 11: hits at multiples of 8 chunks and at the end, 20; a window of 2 chunks: 6, 7, 14, 15, 18, 19.
    group: CacheGroup = make(sliding(3), block_tokens=1)
    assert [place for place in range(24) if group.reachable(place, 20, 8)] == [6, 7, 14, 15, 18, 19]
