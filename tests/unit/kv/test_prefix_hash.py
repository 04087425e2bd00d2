import pytest

from headrace.kv.prefix_hash import HASH_BYTES, HashExtras, block_hashes, extend_block_hashes

TOKENS = [5, 6, 7, 8, 9, 10, 11]


def test_only_full_blocks_have_a_hash() -> None:
    assert block_hashes(TOKENS[:1], 2) == []
    hashes = block_hashes(TOKENS, 2)
    assert len(hashes) == 3
    assert all(len(item) == HASH_BYTES for item in hashes)


def test_fixed_root_gives_the_same_bytes_in_every_process() -> None:
    # A golden value: a change would make every stored and shared cache useless.
    assert block_hashes([1, 2, 3, 4], 4)[0].hex() == (
        "f093343f0a40cb6b80d40ef32e694e88615e748763eeac1e6f6075c483898f12"
    )
    assert block_hashes([1, 2, 3, 4], 4, extras=HashExtras(salt="tenant"))[0].hex() == (
        "2e0a4d29dc3ea8fc73e1e639a37ee5d73e362088ec7d782f2d9ac3cc5691ce15"
    )


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
def test_salts_separate_all_blocks_through_the_chain(left: str | None, right: str | None) -> None:
    pairs = zip(
        block_hashes(TOKENS, 2, extras=HashExtras(salt=left)),
        block_hashes(TOKENS, 2, extras=HashExtras(salt=right)),
        strict=True,
    )
    assert all(one != other for one, other in pairs)


def test_a_salt_cannot_pass_for_tokens() -> None:
    # One block of 1 token with a salt against one block of 2 tokens, whose bytes continue where the salt would stand.
    salted = block_hashes([7], 1, extras=HashExtras(salt="abc"))
    tail = int.from_bytes(b"\x01\x03\x00\x00", "little")
    assert salted != block_hashes([7, tail], 2)


def test_the_largest_token_id_can_be_hashed() -> None:
    assert block_hashes([2**32 - 1], 1) != block_hashes([0], 1)
