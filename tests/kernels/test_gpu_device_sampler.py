"""Tokens drawn where the logits are: those of the sampler in torch, whoever joins, leaves or fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.cuda_graph import DecodeGraphs
from engine.memory.plan import PENALTY_BYTES
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import SampledTokens, Sampler, SamplingParams, SamplingState
from engine.sampling.step import StepOutput, StepTokens
from kernels.gpu import tuning
from kernels.layer_groups import LayerGroup
from tests.support import interpreter
from tests.support.batches import make_metadata

DEVICE = torch.device("cpu" if interpreter.is_interpreting() else "cuda")
VOCAB = 97
PROMPT = (3, 5, 5, 17, 60)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter need not compute what lies beyond a small vocabulary."""
    if interpreter.is_interpreting():
        monkeypatch.setitem(tuning._TABLE, ("sample", 80), {"CHUNK": 128, "num_warps": 8})


def state(hooks: Sequence[Any] = (), **settings: Any) -> SamplingState:
    params = SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "seed": 7, **settings})
    return SamplingState(params, PROMPT, VOCAB, hooks)


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def decode(
    sampler: DeviceSampler,
    logits: torch.Tensor,
    requests: Sequence[SamplingState],
    forced: Sequence[int | None] | None = None,
) -> StepTokens:
    """A step of one token per request."""
    count, logits = len(requests), logits.clone().to(DEVICE)
    asked = forced or [None] * count
    meta = make_metadata([(4, 1, [1, 2])] * count).to(DEVICE)
    sampler.prepare(requests, asked)
    drawn = sampler.launch(logits, logits, meta)
    return sampler.tokens(drawn, StepOutput(logits, logits, meta.query_lens, tuple(range(count))), requests, asked)


def agree(found: StepTokens, expected: SampledTokens) -> None:
    assert found.finite == [True] * len(expected.token_ids)
    assert found.token_ids == expected.token_ids
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.token_id == theirs.token_id and ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_tokens_are_those_of_torch_while_rows_join_and_leave() -> None:
    """A request that takes the row of one that left got its penalties; one that moves up in the batch keeps its own."""
    only_even = lambda row, reply: row.index_fill(0, torch.arange(1, VOCAB, 2), -torch.inf)  # noqa: E731
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "repetition_penalty": 4.0},
        {"temperature": 0},
        {"top_k": 8, "presence_penalty": 3.0, "frequency_penalty": 1.0},
        {"temperature": 0, "top_logprobs": 2, "frequency_penalty": 2.0},
        {"temperature": 0, "logit_bias": {5: 8.0, 60: -100.0}},
        {"temperature": 0, "hooks": (only_even,)},
        {"temperature": 0, "repetition_penalty": 0.3, "logit_bias": {5: 100.0, 17: 100.0}},
        {"temperature": 0, "frequency_penalty": -1.0},
        {"temperature": 0, "logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
    ]
    ours, theirs = [[state(**kind) for kind in kinds] for _ in range(2)]
    sampler = DeviceSampler(VOCAB, DEVICE, max_rows=6)
    present = [(0, 1, 2, 3), (0, 1, 2, 3), (1, 2, 4, 5), (1, 2, 6, 4, 7), (7, 6, 2, 8), (7, 0, 6, 2), (4, 0, 7)]
    for step, indices in enumerate(present):
        logits = rows(1, step).repeat(len(indices), 1)
        forced = [11 if step == 3 and index == 7 else None for index in indices]
        expected = Sampler().sample(logits, [theirs[index] for index in indices], forced)
        agree(decode(sampler, logits, [ours[index] for index in indices], forced), expected)
    assert [one.reply_ids for one in ours] == [one.reply_ids for one in theirs]
    assert sampler._own is not None and len(sampler._own._taken) == 3


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 5.0}, {"repetition_penalty": 3.0}, {"logit_bias": {40: -50.0}}], ids=str
)
def test_a_row_keeps_nothing_of_its_last_owner(penalty: dict[str, Any]) -> None:
    sampler, logits = DeviceSampler(VOCAB, DEVICE, max_rows=1), 10.0 - 0.1 * torch.arange(float(VOCAB)).roll(40)[None]
    first = state(temperature=0, **penalty)
    for _ in range(3):
        decode(sampler, logits, [first])
    assert sampler._own is not None
    row = sampler._own.row_of(first)
    if "logit_bias" in penalty:
        penalty = {"logit_bias": {50: -50.0}}
    ours, theirs = state(temperature=0, **penalty), state(temperature=0, **penalty)
    for _ in range(2):
        agree(decode(sampler, logits, [ours]), Sampler().sample(logits, [theirs]))
    assert sampler._own.row_of(ours) == row and ours.reply_ids[0] == 40


def test_rows_for_penalties_are_as_many_as_are_wanted() -> None:
    """65 rows of a large vocabulary, 90 MB that no memory plan knew of, were taken for a single request."""
    sampler, variants = DeviceSampler(VOCAB, DEVICE, max_rows=8), []
    ours, theirs = [[state(temperature=0, frequency_penalty=2.0) for _ in range(5)] for _ in range(2)]
    for step, count in enumerate((1, 1, 2, 5, 3)):
        logits = rows(1, step).repeat(count, 1)
        agree(decode(sampler, logits, ours[:count]), Sampler().sample(logits, theirs[:count]))
        variants.append(sampler.variant[1])
        if count == 1:
            own = sampler._own
            assert own is not None
            taken = sum(tensor.nbytes for tensor in (own.seen, own.counts, own.bias))
            assert taken == 2 * PENALTY_BYTES * VOCAB
    # A graph that was captured with fewer rows is not replayed with more, nor again afterwards.
    assert variants == [2, 2, 3, 9, 9]
    decode(sampler, logits, [state(temperature=0)])
    assert sampler.variant[1] == 1


def test_seeds_give_the_numbers_of_torch_past_those_made_ahead() -> None:
    ours, theirs = state(seed=2**63 - 1), state(seed=2**63 - 1)
    for request in (ours, theirs):
        for token_id in range(62):
            request.accept(token_id)
    theirs._numbers = []
    sampler = DeviceSampler(VOCAB, DEVICE, max_rows=1)
    ours.next_uniform()
    for step in range(4):
        logits = rows(1, step)
        agree(decode(sampler, logits, [ours]), Sampler().sample(logits, [theirs]))


def test_rows_with_drafts_count_as_far_as_they_come_true() -> None:
    """Each row has the random number of its own place in the reply; what did not come true is counted nowhere."""
    kinds = [{"temperature": 0}, {"temperature": 1.5, "seed": 4}, {"temperature": 0.9, "seed": 5, "top_k": 20}]
    ours, theirs = [[state(**kind) for kind in kinds] for _ in range(2)]
    sampler = DeviceSampler(VOCAB, DEVICE, max_rows=8)
    for step in range(6):
        logits, owners = rows(8, step), (0, 0, 0, 1, 1, 1, 2, 2)
        plain = [Sampler().sample(logits[row : row + 1], [state(**kinds[owner])]).token_ids[0] for row, owner in
                 enumerate(owners)]  # fmt: skip
        drafts = [None, plain[0], 7, None, plain[3], plain[4], None, 7]
        expected = Sampler().sample(logits, [theirs[owner] for owner in owners], drafts=drafts)
        requests = [ours[owner] for owner in owners]
        meta, flat = make_metadata([(4, 1, [1, 2])] * 8).to(DEVICE), logits.to(DEVICE)
        sampler.prepare(requests, [None] * 8, drafts)
        drawn = sampler.launch(flat, flat.clone(), meta)
        found = sampler.tokens(
            drawn, StepOutput(flat, flat, meta.query_lens, tuple(range(8))), requests, [None] * 8, drafts
        )
        assert found.token_ids == expected.token_ids
        assert found.token_ids[1] is not None and found.token_ids[2] is None
    assert [one.reply_ids for one in ours] == [one.reply_ids for one in theirs]
    assert ours[0].generated_count == 12


def test_what_earlier_tokens_count_for_takes_no_drafts() -> None:
    """The kernel learns of a reply's tokens step by step."""
    sampler = DeviceSampler(VOCAB, DEVICE, max_rows=4)
    assert sampler.verifies(state(temperature=0)) and sampler.verifies(state(temperature=0.7, top_p=0.9))
    for kind in ({"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"top_logprobs": 1}):
        assert not sampler.verifies(state(**kind))


def test_a_bad_row_is_told_of_and_the_others_go_on() -> None:
    ours, theirs = [[state(temperature=0, presence_penalty=p) for p in (0.0, 1.0, 2.0)] for _ in range(2)]
    ours.append(state(temperature=0, top_logprobs=1))
    sampler, logits = DeviceSampler(VOCAB, DEVICE, max_rows=4), rows(4, 1)
    logits[1, 40], logits[3, 96] = torch.nan, torch.inf
    found = decode(sampler, logits, ours)
    assert found.finite == [True, False, True, False]
    assert [one.generated_count for one in ours] == [1, 0, 1, 0]
    good = [0, 2]
    expected = Sampler().sample(logits[good], [theirs[row] for row in good])
    assert [found.token_ids[row] for row in good] == expected.token_ids
    logits = rows(2, 2)
    expected = Sampler().sample(logits, [theirs[row] for row in good])
    agree(decode(sampler, logits, [ours[row] for row in good]), expected)


def test_a_bad_token_of_a_prefill_ends_that_sequence_only() -> None:
    """Sequences of 1, 3, 2 and 4 tokens, the third without logits; bad values lie in tokens that have none."""
    lens, wanted, sampler = (1, 3, 2, 4), (0, 1, 3), DeviceSampler(VOCAB, DEVICE, max_rows=4)
    meta = make_metadata([(0, count, [1, 2]) for count in lens]).to(DEVICE)
    logits = rows(3, 5).to(DEVICE)
    for bad, finite in {(): (1, 1, 1, 1), (2,): (1, 0, 1, 1), (4, 8): (1, 1, 0, 0), (0, 9): (0, 1, 1, 0)}.items():
        hidden = torch.ones(10, 8, device=DEVICE)
        hidden[list(bad), 3] = torch.nan
        requests = [state(temperature=0) for _ in wanted]
        sampler.prepare(requests, [None] * 3)
        drawn = sampler.launch(hidden, logits.clone(), meta)
        found = sampler.tokens(drawn, StepOutput(hidden, logits, lens, wanted), requests, [None] * 3)
        assert found.finite == [bool(flag) for flag in finite]
        assert [one.generated_count for one in requests] == [finite[index] for index in wanted]


class _Head:
    """In place of a model: its logits are those it was given, for as many rows as are asked for."""

    device = DEVICE

    def __init__(self) -> None:
        self.logits = torch.zeros(4, VOCAB, device=DEVICE)

    def hidden_states(self, token_ids: torch.Tensor, cache: Any, meta: Any, states: None) -> torch.Tensor:
        return torch.zeros(len(token_ids), 8, device=DEVICE)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(hidden)].clone()


class _Cache:
    groups = (LayerGroup(),)

    class spec:
        block_size = 4


def test_a_graph_ends_in_the_ids_and_what_runs_before_its_capture_counts_nothing() -> None:
    """Padding rows and warm-ups went into the penalties of the batch's requests."""
    model, sampler = _Head(), DeviceSampler(VOCAB, DEVICE, max_rows=4)
    graphs = DecodeGraphs(model, _Cache(), max_seq_len=16)  # type: ignore[arg-type]
    kinds = [{"temperature": 0, "frequency_penalty": 0.6}, {"temperature": 0}, {"presence_penalty": 9.0, "top_k": 4}]
    kinds.append({"temperature": 0})
    ours, theirs = [[state(**kind) for kind in kinds] for _ in range(2)]
    for indices in [(0, 1), (1, 3, 2, 0), (0, 1, 3), (0,), (3, 0, 1), (0,), (0, 1)]:
        requests = [ours[index] for index in indices]
        logits = -0.5 * torch.arange(VOCAB).repeat(len(indices), 1)  # so close that a token counted twice shows
        model.logits[:] = logits[:1].to(DEVICE)
        meta = make_metadata([(4, 1, [1, 2])] * len(indices)).to(DEVICE)
        asked = [None] * len(indices)
        sampler.prepare(requests, asked)
        ids = torch.zeros(len(indices), dtype=torch.int64, device=DEVICE)
        graphs._warm_up(graphs._filled(ids, meta), sampler, None)
        hidden, made, drawn = graphs.run(ids, meta, sampler)
        assert drawn is not None and len(drawn) == len(indices)
        output = StepOutput(hidden, made, meta.query_lens, tuple(range(len(indices))))
        found = sampler.tokens(drawn, output, requests, asked)
        agree(found, Sampler().sample(logits, [theirs[index] for index in indices]))
    assert {key[0] for key in graphs._captured} == {1, 2, 4}
