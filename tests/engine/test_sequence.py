import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.block_pool import BlockPool, OutOfBlocks
from engine.kv_cache.integrity import check_integrity
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.prefixes import common_prefix_len
from engine.sequence import Sequence

SIZE = 4


def filled(cache: PrefixCache, count: int) -> Sequence:
    sequence = Sequence(cache, "s")
    sequence.set_tokens(list(range(count)))
    sequence.reserve(count)
    sequence.advance(count)
    return sequence


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_common_prefix_len_equals_counting(left, right):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert common_prefix_len(left, tuple(right)) == count


def test_cutting_inside_a_shared_block_copies_it_and_leaves_the_original():
    cache = PrefixCache(BlockPool(16), SIZE)
    sequence = filled(cache, 11)
    before = list(sequence.block_table)
    sequence.truncate(6)
    assert sequence.cache_pos == 6
    assert sequence.block_table[0] == before[0]
    assert sequence.block_table[1] != before[1]
    assert cache.pool.take_copies() == [(before[1], sequence.block_table[1])]
    assert len(cache.match(list(range(8)))) == 2
    sequence.set_tokens(list(range(6)))
    check_integrity(cache, [sequence])


def test_cutting_inside_an_own_block_copies_nothing():
    cache = PrefixCache(BlockPool(16), SIZE)
    sequence = filled(cache, 11)
    sequence.truncate(9)
    assert sequence.cache_pos == 9 and cache.pool.take_copies() == []


def test_cutting_without_a_block_for_the_copy_falls_back_to_the_block_boundary():
    cache = PrefixCache(BlockPool(4), SIZE)
    sequence, other = filled(cache, 8), Sequence(cache)
    other.reserve(4)
    sequence.truncate(6)
    assert sequence.cache_pos == 4
    sequence.set_tokens(list(range(4)))
    check_integrity(cache, [sequence, other])


def test_fork_shares_full_blocks_and_copies_the_last():
    cache = PrefixCache(BlockPool(16), SIZE)
    parent = filled(cache, 10)
    child = parent.fork("child", 10)
    assert child.block_table[:2] == parent.block_table[:2]
    assert child.block_table[2] != parent.block_table[2]
    assert cache.pool.take_copies() == [(parent.block_table[2], child.block_table[2])]
    check_integrity(cache, [parent, child])
    child.set_tokens([*range(10), 77, 78, 79])
    child.reserve(13)
    child.advance(3)
    assert parent.token_ids == list(range(10)) and parent.cache_pos == 10
    check_integrity(cache, [parent, child])


def test_going_back_to_an_earlier_branch_finds_its_blocks_again():
    cache = PrefixCache(BlockPool(16), SIZE)
    sequence = filled(cache, 12)
    first = list(sequence.block_table)
    sequence.truncate(4)
    sequence.set_tokens([*range(4), 50, 51, 52, 53, 54])
    sequence.reserve(9)
    sequence.advance(5)
    sequence.truncate(4)
    sequence.set_tokens([*range(12), 99])
    sequence.adopt_prefix()
    assert sequence.cache_pos == 12 and sequence.block_table == first
    check_integrity(cache, [sequence])


def test_reserve_keeps_what_it_got_when_blocks_run_out():
    cache = PrefixCache(BlockPool(3), SIZE)
    sequence = Sequence(cache)
    sequence.set_tokens(list(range(12)))
    with pytest.raises(OutOfBlocks):
        sequence.reserve(12)
    assert len(sequence.block_table) == 2
    check_integrity(cache, [sequence])
