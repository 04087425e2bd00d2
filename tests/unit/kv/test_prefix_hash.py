import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.prefix_hash import (
    HASH_BYTES,
    MAX_TOKEN_ID,
    NO_EXTRAS,
    ROOT,
    ExtraKey,
    ExtraKind,
    HashExtras,
    block_hashes,
    extend_block_hashes,
    extras_of,
    root_of,
    unit_extras,
)
from headrace.types.requests import EmbedsSpan, EngineRequest, MediaSpan
from headrace.types.sampling import SamplingParams

TOKENS = [5, 6, 7, 8, 9, 10, 11]
FULL_EXTRAS = HashExtras(
    salt="tenant",
    adapter=b"\1" * 32,
    media=(MediaSpan("image", 3, 4, 4),),
    embeds=(EmbedsSpan(b"\2" * 32, 9, 2),),
)


def salted(salt: str | None) -> list[bytes]:
    return block_hashes(TOKENS, 2, extras=HashExtras(salt=salt))


def test_only_complete_units_have_a_hash() -> None:
    assert block_hashes(TOKENS[:1], 2) == []
    hashes = block_hashes(TOKENS, 2)
    assert len(hashes) == 3
    assert all(len(item) == HASH_BYTES for item in hashes)


def test_fixed_root_gives_the_same_bytes_in_every_process() -> None:
    # Golden values: a change would make every stored and shared cache useless.
    assert block_hashes([1, 2, 3, 4], 4)[0].hex() == (
        "f093343f0a40cb6b80d40ef32e694e88615e748763eeac1e6f6075c483898f12"
    )
    assert block_hashes([1, 2, 3, 4], 4, extras=HashExtras(salt="tenant"))[0].hex() == (
        "2e0a4d29dc3ea8fc73e1e639a37ee5d73e362088ec7d782f2d9ac3cc5691ce15"
    )


GOLDEN = {
    "adapter": (HashExtras(adapter=b"\1" * 32), "3800284347f6511fdc1df037ebd399d0b1b4fce6a11596a360c004c0e2204ba2"),
    "media": (
        HashExtras(media=(MediaSpan("image", 3, 4, 4),)),
        "d8e8e880bb447e8b9aaa120664218a999e1ba9414b087acd40a8179a61c1c7d9",
    ),
    "embeds": (
        HashExtras(embeds=(EmbedsSpan(b"\2" * 32, 3, 4),)),
        "addc958af736c36ca71c5eccc22c99a531208eaa6db034a0bfbf022b3944eb71",
    ),
    "encoder": (
        HashExtras(media=(MediaSpan("sound", 0, 0, 30),)),
        "693c0534f6b26eb88a249fcfd4948c6567433829440fecce7906a14d9522bc32",
    ),
    "all": (FULL_EXTRAS, "75e77f1cceec445b4af0823f717395e5f969b91cf478c74ed2e79f527235a55a"),
}


@pytest.mark.parametrize(("extras", "golden"), GOLDEN.values(), ids=GOLDEN)
def test_extra_keys_have_golden_bytes(extras: HashExtras, golden: str) -> None:
    assert block_hashes(range(12), 4, extras=extras)[-1].hex() == golden


def test_the_formula_written_out() -> None:
    def key(kind: int, value: bytes) -> bytes:
        return bytes([kind]) + struct.pack("<I", len(value)) + value

    first = blake3(
        blake3(b"headrace prefix chain, version 1").digest()
        + struct.pack("<4I", 0, 1, 2, 3)
        + key(1, b"tenant")
        + key(2, b"\1" * 32)
        + key(3, struct.pack("<q", 3) + b"image")
    ).digest()
    second = blake3(first + struct.pack("<4I", 4, 5, 6, 7) + key(3, struct.pack("<q", -1) + b"image")).digest()
    third = blake3(second + struct.pack("<4I", 8, 9, 10, 11) + key(4, struct.pack("<q", 1) + b"\2" * 32)).digest()
    assert block_hashes(range(12), 4, extras=FULL_EXTRAS) == [first, second, third]


def test_seeds_have_golden_roots() -> None:
    assert root_of("") == ROOT
    assert root_of("store 1").hex() == "5e653ef2e963093783971a1d9c9a514f737cb406bcc2b740e5a6fb2142620113"
    assert len({root_of(""), root_of("a"), root_of("b")}) == 3
    assert block_hashes(TOKENS, 2, root=root_of("a"))[2] != block_hashes(TOKENS, 2)[2]


def test_continuing_after_known_hashes_equals_one_go() -> None:
    whole = block_hashes(TOKENS, 2, extras=HashExtras(salt="s"))
    for known in range(4):
        assert block_hashes(TOKENS, 2, extras=HashExtras(salt="s"), known=whole[:known]) == whole


def test_known_hashes_beyond_the_tokens_are_cut() -> None:
    whole = block_hashes(TOKENS, 2)
    assert block_hashes(TOKENS[:4], 2, known=whole) == whole[:2]


def test_extending_in_place_touches_only_what_is_new() -> None:
    hashes = [b"x" * HASH_BYTES]
    extend_block_hashes(hashes, TOKENS, 2)
    assert hashes[0] == b"x" * HASH_BYTES
    assert len(hashes) == 3


def test_a_hash_stands_for_the_whole_prefix() -> None:
    first, second = block_hashes([1, 1, 2, 2], 2)
    assert first != second
    assert block_hashes([9, 1, 2, 2], 2)[1] != second


@pytest.mark.parametrize(("left", "right"), [(None, ""), (None, "a"), ("a", "b"), ("", "a"), ("a", "a\0")])
def test_salts_separate_all_units_through_the_chain(left: str | None, right: str | None) -> None:
    assert all(one != other for one, other in zip(salted(left), salted(right), strict=True))


def test_a_salt_cannot_pass_for_tokens() -> None:
    # One unit of 1 token with a salt against one unit of 2 tokens, whose bytes go on where the salt would stand.
    one = block_hashes([7], 1, extras=HashExtras(salt="abc"))
    tail = int.from_bytes(b"\x01\x03\x00\x00", "little")
    assert one != block_hashes([7, tail], 2)


def test_the_largest_token_id_can_be_hashed() -> None:
    assert MAX_TOKEN_ID == 2**32 - 1
    assert block_hashes([MAX_TOKEN_ID], 1) != block_hashes([0], 1)
    with pytest.raises(OverflowError):
        block_hashes([MAX_TOKEN_ID + 1], 1)


def test_a_value_of_one_kind_never_passes_for_another() -> None:
    kinds = [
        HashExtras(salt="x"),
        HashExtras(adapter=b"x"),
        HashExtras(media=(MediaSpan("x", 0, 1, 1),)),
        HashExtras(embeds=(EmbedsSpan(b"x", 0, 1),)),
        HashExtras(media=(MediaSpan("x", 0, 0, 1),)),
        NO_EXTRAS,
        HashExtras(salt="x", adapter=b"x"),
        HashExtras(salt="xx"),
    ]
    assert len({block_hashes(TOKENS, 2, extras=extras)[0] for extras in kinds}) == len(kinds)


def test_media_enter_every_unit_they_overlap_with_their_place() -> None:
    extras = HashExtras(media=(MediaSpan("a", 3, 4, 4), MediaSpan("b", 7, 1, 1), MediaSpan("c", 12, 9, 9)))
    keys = [[(key.value, key.offset_tokens) for key in unit_extras(extras, unit, 4)] for unit in range(6)]
    assert keys == [[(b"a", 3)], [(b"a", -1), (b"b", 3)], [], [(b"c", 0)], [(b"c", -4)], [(b"c", -8)]]


def test_media_and_embeddings_may_overlap() -> None:
    extras = HashExtras(media=(MediaSpan("a", 0, 20, 4),), embeds=(EmbedsSpan(b"e", 6, 2),))
    keys = [[(key.kind, key.offset_tokens) for key in unit_extras(extras, unit, 4)] for unit in range(3)]
    media, embeds = ExtraKind.MEDIA, ExtraKind.EMBEDS
    assert keys == [[(media, 0)], [(media, -4), (embeds, 2)], [(media, -8)]]


def test_an_image_at_another_place_is_another_prefix() -> None:
    hashes = {
        block_hashes([0] * 12, 4, extras=HashExtras(media=(MediaSpan("image", start, 4, 4),)))[2] for start in range(8)
    }
    assert len(hashes) == 8


def test_text_before_an_image_is_shared() -> None:
    plain = block_hashes([0] * 12, 4)
    with_image = block_hashes([0] * 12, 4, extras=HashExtras(media=(MediaSpan("image", 5, 4, 4),)))
    assert with_image[0] == plain[0]
    assert with_image[1] != plain[1]
    assert with_image[2] != plain[2]


def test_head_keys_are_in_the_first_unit_only() -> None:
    kinds = [[key.kind for key in unit_extras(FULL_EXTRAS, unit, 4)] for unit in range(4)]
    assert kinds == [
        [ExtraKind.SALT, ExtraKind.ADAPTER, ExtraKind.MEDIA],
        [ExtraKind.MEDIA],
        [ExtraKind.EMBEDS],
        [],
    ]


def test_the_place_of_a_key_is_signed_and_counts_only_where_there_is_one() -> None:
    assert ExtraKey(ExtraKind.MEDIA, b"x", -1).encoded() != ExtraKey(ExtraKind.MEDIA, b"x", 1).encoded()
    assert ExtraKey(ExtraKind.SALT, b"ab").encoded() == b"\x01\x02\0\0\0ab"


def test_all_of_a_request_counts() -> None:
    request = EngineRequest(
        request_id="r",  # type: ignore[arg-type]
        prompt_token_ids=[1],
        sampling=SamplingParams(seed=0),
        cache_salt="tenant",
        adapter=b"\1" * 32,
        media=[MediaSpan("image", 3, 4, 4)],
        embeds=[EmbedsSpan(b"\2" * 32, 9, 2)],
    )
    assert extras_of(request) == FULL_EXTRAS


SPANS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=6)


@given(SPANS, SPANS, st.integers(1, 5))
def test_spans_are_found_as_by_looking_at_each(
    media: list[tuple[int, int]], embeds: list[tuple[int, int]], unit_tokens: int
) -> None:
    def placed(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
        spans, end = [], 0
        for tokens, gap in gaps:
            spans.append((end + gap, tokens))
            end += gap + tokens
        return spans

    extras = HashExtras(
        media=tuple(MediaSpan(str(start), start, tokens, 1) for start, tokens in placed(media)),
        embeds=tuple(EmbedsSpan(b"%d" % start, start, tokens) for start, tokens in placed(embeds)),
    )
    for unit in range(80 // unit_tokens):
        first, end = unit * unit_tokens, (unit + 1) * unit_tokens
        expected = [
            ExtraKey(kind, b"%d" % start, start - first)
            for kind, spans in ((ExtraKind.MEDIA, placed(media)), (ExtraKind.EMBEDS, placed(embeds)))
            for start, tokens in spans
            if start < end and first < start + tokens
        ]
        assert unit_extras(extras, unit, unit_tokens) == expected
