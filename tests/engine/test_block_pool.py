import pytest

from engine.kv_cache.block_pool import BlockPool, OutOfBlocks


def test_lowest_free_block_first_and_never_the_null_block():
    pool = BlockPool(limit=5)
    assert [pool.allocate() for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.release(3)
    pool.release(2)
    assert pool.allocate() == 2


def test_a_block_is_freed_by_its_last_owner_only():
    pool = BlockPool(limit=3)
    block = pool.allocate()
    pool.add_ref(block)
    pool.release(block)
    assert pool.ref_count(block) == 1 and pool.free_count == 1
    pool.release(block)
    assert pool.ref_count(block) == 0 and pool.free_count == 2
    with pytest.raises(ValueError):
        pool.add_ref(block)


def test_trim_lowers_the_high_water_mark_to_the_highest_used_block():
    pool = BlockPool(limit=10)
    blocks = [pool.allocate() for _ in range(6)]
    for block in blocks[2:]:
        pool.release(block)
    assert pool.trim() == 3
    pool.check_integrity({1: 1, 2: 1})
    assert pool.allocate() == 3


@pytest.mark.parametrize("owners", [{}, {1: 2}, {1: 1, 2: 1}])
def test_integrity_check_notices_a_wrong_count(owners):
    pool = BlockPool(limit=4)
    pool.allocate()
    with pytest.raises(AssertionError):
        pool.check_integrity(owners)
