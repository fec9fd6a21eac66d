"""The tensors of recurrent states: slots that are copied, cleared, put side by side, given back and stored."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache.checkpoints import CLEARED
from engine.kv_cache.ssm_state import SSMStatePool, SSMStateSpec

SPEC = SSMStateSpec(2, (6, 3), (2, 4, 5), torch.bfloat16)


@pytest.fixture
def pool() -> SSMStatePool:
    pool = SSMStatePool(SPEC, torch.device("cpu"))
    for slot in (1, 2, 3):
        state = pool.take((slot,))
        state.conv.fill_(slot)
        state.ssm.fill_(slot)
    return pool


def values(pool: SSMStatePool, slot: int) -> set[float]:
    return {value for tensor in pool.export_state(slot).values() for value in tensor.float().unique().tolist()}


def test_bytes_are_those_of_the_tensors(pool):
    assert SPEC.nbytes == 2 * (6 * 3 * 2 + 2 * 4 * 5 * 4)
    assert pool.reserved_bytes == 3 * SPEC.nbytes
    pool.trim(3)
    assert pool.reserved_bytes == 2 * SPEC.nbytes


def test_copies_are_made_in_order(pool):
    pool.copy([(1, 2), (3, 1), (CLEARED, 3)])
    assert [values(pool, slot) for slot in (1, 2, 3)] == [{3.0}, {1.0}, {0.0}]


def test_a_batch_has_its_states_side_by_side_and_puts_them_back(pool):
    """Padding shares slot 0; what is written there reaches nobody."""
    batch = pool.take((3, 0, 1, 0))
    assert batch.ssm.shape == (2, 4, 2, 4, 5) and batch.ssm[1].is_contiguous() and batch.conv[1].is_contiguous()
    assert [batch.ssm[0, i].unique().tolist() for i in (0, 2)] == [[3.0], [1.0]]
    batch.ssm.add_(10)
    batch.conv.add_(10)
    pool.put_back(batch)
    assert [values(pool, slot) for slot in (1, 2, 3)] == [{11.0}, {2.0}, {13.0}]


def test_a_single_state_is_not_copied(pool):
    pool.take((2,)).ssm.fill_(9)
    assert values(pool, 2) == {2.0, 9.0}


@pytest.mark.parametrize("slots", [(2,), (3, 2)])
def test_a_step_that_is_given_up_leaves_the_slots_as_they_were(pool, slots):
    batch = pool.take(slots, apart=True)
    batch.ssm.fill_(9)
    batch.conv.fill_(9)
    assert values(pool, 2) == {2.0} and values(pool, 3) == {3.0}
    pool.put_back(batch)
    assert values(pool, 2) == {9.0}


def test_captured_steps_have_their_states_at_an_address_that_stays(pool):
    """Until more rows are asked for: what was captured before has to be captured again."""
    one, two = pool.fixed(1), pool.fixed(2)
    assert [part.shape[1] for part in (one.batch.ssm, two.batch.ssm)] == [1, 2]
    assert one.batch.ssm.data_ptr() != two.batch.ssm.data_ptr()
    assert pool.fixed(1).batch.ssm.data_ptr() == pool.fixed(2).batch.ssm.data_ptr() == two.batch.ssm.data_ptr()
    assert pool.workspace_bytes == 2 * SPEC.nbytes
    two.load(pool, (3, 1))
    taken = two.take((3, 1))
    assert all(t[:, 0].unique().tolist() == [3] and t[:, 1].unique().tolist() == [1] for t in (taken.conv, taken.ssm))
    for tensor in (taken.conv, taken.ssm):
        assert tensor[0].is_contiguous()
        tensor.mul_(10)
    two.put_back(taken)
    assert values(pool, 3) == {3.0}, "a step that fails leaves the slots as they were"
    two.save(pool, (3, 1))
    assert [values(pool, slot) for slot in (1, 2, 3)] == [{10.0}, {2.0}, {30.0}]


def test_a_stored_state_comes_back_bit_for_bit(pool):
    generator = torch.Generator().manual_seed(0)
    state = pool.take((1,))
    state.ssm.copy_(torch.randn(state.ssm.shape, generator=generator))
    stored = pool.export_state(1)
    pool.copy([(CLEARED, 1)])
    pool.import_state(7, stored)
    assert all(torch.equal(stored[name], tensor) for name, tensor in pool.export_state(7).items())


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda state: state.pop("conv"), "has the tensors conv and ssm"),
        (lambda state: state.update(more=state["conv"]), "has the tensors conv and ssm"),
        (lambda state: state.update(ssm=state["ssm"][:1]), r"ssm must be torch.float32 \[2, 2, 4, 5\]"),
        (lambda state: state.update(conv=state["conv"].float()), r"conv must be torch.bfloat16 \[2, 6, 3\]"),
        (lambda state: state["ssm"][1, 1, 3, 4].fill_(torch.inf), "ssm holds values that are not finite"),
    ],
)
def test_a_damaged_state_is_refused_before_anything_is_written(pool, damage, sentence):
    stored = pool.export_state(1)
    damage(stored)
    with pytest.raises(ValueError, match=sentence):
        pool.import_state(2, stored)
    assert values(pool, 2) == {2.0}
