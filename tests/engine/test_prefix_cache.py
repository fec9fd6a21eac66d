from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.integrity import check_integrity
from engine.kv_cache.prefix_cache import PrefixCache
from engine.sequence import Sequence

SIZE = 4


def run(cache: PrefixCache, token_ids: list[int], session_id: str | None = None) -> Sequence:
    """A sequence whose every token is in the cache, as after a turn."""
    sequence = Sequence(cache, session_id)
    sequence.set_tokens(token_ids)
    sequence.adopt_prefix()
    sequence.reserve(len(token_ids))
    sequence.advance(len(token_ids) - sequence.cache_pos)
    return sequence


def test_equal_beginnings_share_full_blocks_and_nothing_else():
    cache = PrefixCache(BlockPool(32), SIZE)
    first = run(cache, list(range(10)))
    second = run(cache, [*range(8), 90, 91])
    assert first.block_table[:2] == second.block_table[:2]
    assert first.block_table[2] != second.block_table[2]
    assert cache.pool.used_count == 4


def test_same_tokens_under_another_parent_are_another_block():
    cache = PrefixCache(BlockPool(32), SIZE)
    first = run(cache, [1, 1, 1, 1, 5, 6, 7, 8])
    second = run(cache, [2, 2, 2, 2, 5, 6, 7, 8])
    assert first.block_table[1] != second.block_table[1]


def test_blocks_computed_twice_at_once_are_stored_once():
    cache = PrefixCache(BlockPool(32), SIZE)
    twins = [Sequence(cache), Sequence(cache)]
    for twin in twins:
        twin.set_tokens(list(range(9)))
        twin.reserve(9)
    for twin in twins:
        twin.advance(9)
    assert twins[0].block_table[:2] == twins[1].block_table[:2]
    assert cache.pool.used_count == 4
    check_integrity(cache, twins)


def test_eviction_takes_the_least_recently_used_tail_first():
    cache = PrefixCache(BlockPool(32), SIZE)
    old, new = run(cache, list(range(12))), run(cache, list(range(100, 112)))
    old.touch()
    new.touch()
    old.release_blocks()
    new.release_blocks()
    assert cache.evictable_count() == 6
    assert cache.evict(2) == 2
    assert len(cache.match(list(range(12)))) == 1
    assert len(cache.match(list(range(100, 112)))) == 3


def test_blocks_in_use_are_never_evicted_nor_is_a_parent_of_one():
    cache = PrefixCache(BlockPool(32), SIZE)
    kept = run(cache, list(range(8)))
    gone = run(cache, [*range(8), *range(50, 58)])
    gone.release_blocks()
    assert cache.evictable_count() == 2
    assert cache.evict(10) == 2
    assert len(cache.match(list(range(8)))) == 2
    check_integrity(cache, [kept])


def test_forgetting_a_session_frees_what_only_it_used():
    cache = PrefixCache(BlockPool(32), SIZE)
    shared = run(cache, list(range(8)), "a")
    reader = run(cache, [*range(8), *range(20, 28)], "b")
    shared.release_blocks()
    reader_ids = list(reader.token_ids)
    cache.forget("a")
    assert len(cache.match(reader_ids)) == 4
    reader.release_blocks()
    cache.forget("b")
    cache.forget("a")
    assert cache.pool.used_count == 0


def test_one_token_always_stays_to_be_run():
    cache = PrefixCache(BlockPool(32), SIZE)
    run(cache, list(range(8)))
    again = Sequence(cache)
    again.set_tokens(list(range(8)))
    again.adopt_prefix()
    assert again.cache_pos == 4 and again.remaining == 4
