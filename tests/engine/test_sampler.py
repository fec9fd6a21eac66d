"""The draw: exact distribution, same seed same tokens, nothing impossible. Filters as in transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import generation

from engine.errors import InvalidRequest
from engine.sampling import processors
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler, SamplingState, candidates, fresh_seed, uniform

VOCAB = 97


def rows(count: int = 3, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def state(prompt=(), vocab: int = VOCAB, hooks=(), **settings) -> SamplingState:
    settings = {"temperature": 1.0, "top_p": 1.0, "seed": 7, **settings}
    return SamplingState(SamplingParams(**settings), prompt, vocab, hooks)


def draw(logits: torch.Tensor, request: SamplingState) -> int:
    return Sampler().sample(logits.reshape(1, -1), [request]).token_ids[0]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 20.0])
def test_repetition_penalty_as_in_transformers(penalty):
    logits, prompt = rows(), torch.tensor([[1, 2, 2], [5, 6, 7], [0, 0, 96]])
    seen = torch.zeros(3, VOCAB, dtype=torch.bool).scatter(1, prompt, True)
    expected = generation.RepetitionPenaltyLogitsProcessor(penalty)(prompt, logits.clone())
    torch.testing.assert_close(processors.apply_repetition_penalty(logits, seen, penalty), expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_filters_as_in_transformers(seed, scale):
    logits = rows(4, seed, 20_000, scale)
    for k in (1, 2, 50, 20_000, 30_000):
        expected = generation.TopKLogitsWarper(k)(None, logits)
        assert torch.equal(processors.apply_top_k(logits, k), expected)
    for p in (1e-6, 0.3, 0.9, 0.999, 1.0):
        expected = generation.TopPLogitsWarper(p)(None, logits) if p < 1 else logits
        found = processors.apply_top_p(logits, p)
        # Sums of thousands of float32 shares differ in the last bits: at most a token at the edge.
        assert int((torch.isfinite(found) != torch.isfinite(expected)).sum()) <= 4
        assert torch.isfinite(found).any(dim=-1).all()
    for p in (0.0, 0.05, 0.5, 1.0):
        expected = generation.MinPLogitsWarper(p)(None, logits) if p else logits
        assert torch.equal(processors.apply_min_p(logits, p), expected)


def test_filters_after_one_another_as_in_transformers():
    logits = rows(1, 3, 5_000)[0]
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02)
    expected = logits[None] / 0.7
    expected = generation.TopKLogitsWarper(40)(None, expected)
    expected = generation.TopPLogitsWarper(0.9)(None, expected)
    expected = generation.MinPLogitsWarper(0.02)(None, expected)
    ids, kept = candidates(logits, params)
    assert torch.equal(ids, torch.nonzero(torch.isfinite(expected[0])).squeeze(-1))
    torch.testing.assert_close(torch.softmax(kept, 0), torch.softmax(expected[0], 0)[ids])


def test_presence_and_frequency_count_the_reply_only():
    request = state(prompt=(3, 3), presence_penalty=0.5, frequency_penalty=0.25)
    logits = rows(1)[0]
    for token_id in (4, 4, 9):
        request.accept(token_id)
    expected = logits.clone()
    expected[4] -= 0.5 + 2 * 0.25
    expected[9] -= 0.5 + 0.25
    torch.testing.assert_close(request.adjust(logits), expected)


def test_repetition_penalty_counts_prompt_and_reply():
    request = state(prompt=(3, 10**9), repetition_penalty=2.0)
    request.accept(4)
    logits = torch.full((VOCAB,), 1.0)
    changed = torch.nonzero(request.adjust(logits) != logits).flatten().tolist()
    assert changed == [3, 4]


def test_logit_bias_shifts_bans_and_forces():
    logits = rows(1)[0]
    torch.testing.assert_close(state(logit_bias={5: 2.5}).adjust(logits)[5], logits[5] + 2.5)
    best = int(logits.argmax())
    assert draw(logits, state(temperature=0, logit_bias={best: -100})) != best
    for temperature in (0, 1e-4, 1.0, 100.0):
        for seed in range(20):
            assert draw(logits, state(temperature=temperature, seed=seed, logit_bias={13: 100})) == 13
            assert draw(logits, state(temperature=temperature, seed=seed, logit_bias={best: -100})) != best
    with pytest.raises(InvalidRequest, match="97"):
        state(logit_bias={VOCAB: 1.0})


def test_banning_everything_falls_back_to_the_models_own_logits():
    logits = rows(1)[0]
    bans = dict.fromkeys(range(VOCAB), -100.0)
    assert draw(logits, state(temperature=0, logit_bias=bans)) == int(logits.argmax())
    assert 0 <= draw(logits, state(logit_bias=bans)) < VOCAB


def test_greedy_takes_the_lowest_id_of_equals_and_else_the_argmax():
    logits = rows(50, 1, 5_000)
    requests = [state(temperature=0, vocab=5_000) for _ in range(50)]
    assert Sampler().sample(logits, requests).token_ids == logits.argmax(dim=-1).tolist()
    tied = torch.zeros(1, VOCAB)
    tied[0, [90, 17, 55]] = 4.0
    assert draw(tied, state(temperature=0)) == 17
    assert draw(tied, state(temperature=0, logit_bias={17: -1.0})) == 55


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.6, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_exact_distribution(options):
    """Chi-square against the filtered softmax, over the token counter and over seeds."""
    logits, count = rows(1, 5, 12, 1.5)[0], 1500
    ids, kept = candidates(logits, state(vocab=12, **options).params)
    shares = torch.softmax(kept.double(), 0).numpy()
    one_reply = state(vocab=12, **options)
    by_counter = [draw(logits, one_reply) for _ in range(count)]
    by_seed = [draw(logits, state(vocab=12, **{**options, "seed": seed})) for seed in range(count)]
    for drawn in (by_counter, by_seed):
        found = np.array([drawn.count(int(token_id)) for token_id in ids])
        assert found.sum() == count
        chi_square = float(((found - count * shares) ** 2 / (count * shares)).sum())
        degrees = len(ids) - 1
        assert chi_square < degrees + 4 * math.sqrt(2 * max(degrees, 1)) + 4


def test_same_seed_same_tokens_whatever_else_is_sampled():
    """A shared generator gave other text once another chat had drawn from it."""
    logits = rows(64, 9)
    alone = state(seed=42)
    expected = [draw(row, alone) for row in logits]
    mixed, others = state(seed=42), [state(seed=s, top_k=s) for s in (1, 2)]
    batches = [torch.stack([row * 2, row, -row]) for row in logits]
    found = [Sampler().sample(batch, [others[0], mixed, others[1]]).token_ids[1] for batch in batches]
    assert found == expected
    resumed = state(seed=42)
    for token_id in expected[:30]:
        resumed.accept(token_id)
    assert [draw(row, resumed) for row in logits[30:]] == expected[30:]
    different = state(seed=43)
    assert [draw(row, different) for row in logits] != expected


def test_seeds():
    assert len({fresh_seed() for _ in range(50)}) > 45
    assert all(0 <= fresh_seed() < 2**31 for _ in range(50))
    assert state(seed=None).seed != state(seed=None).seed
    numbers = [uniform(seed, count) for seed in (0, 1, 2**63 - 1) for count in range(2000)]
    assert len(set(numbers)) == len(numbers) and min(numbers) >= 0 and max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.02


@settings(max_examples=150)
@given(
    values=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=30),
    temperature=st.sampled_from([0, 1e-300, 1e-4, 1.0, 100.0]),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    min_p=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_what_is_drawn_is_always_possible(values, temperature, top_p, top_k, min_p, seed):
    logits = torch.tensor(values)
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    token_id = draw(logits, state(vocab=len(values), **options))
    if temperature == 0 or top_k == 1 or top_p in (0.0, 1e-9) or min_p == 1.0:
        assert logits[token_id] >= logits.max() - abs(float(logits.max())) * 1e-6 - 1e-3
    elif temperature <= 1.0:
        assert float(torch.softmax((logits - logits.max()).double() / max(temperature, 1e-30), 0)[token_id]) > 0


def test_hooks_change_the_row_and_see_the_reply():
    seen = []

    def only_five(row, reply_ids):
        seen.append(reply_ids)
        masked = torch.full_like(row, -torch.inf)
        masked[5] = row[5]
        return masked

    request = state(hooks=(only_five,))
    assert [draw(row, request) for row in rows(3)] == [5, 5, 5]
    assert seen == [(), (5,), (5, 5)]
    infinite = state(hooks=(lambda row, _: row.index_fill(0, torch.tensor([8]), torch.inf),))
    assert draw(rows(1)[0], infinite) == 8


def test_logprobs_are_the_models_own():
    logits = rows(1)[0]
    options = {"temperature": 5.0, "top_k": 1, "logit_bias": {3: 50.0}, "top_logprobs": 4}
    result = Sampler().sample(logits[None], [state(**options)])
    reference = torch.log_softmax(logits.double(), 0)
    assert result.token_ids == [3]
    found = result.logprobs[0]
    assert found.logprob == pytest.approx(float(reference[3]))
    assert [i for i, _ in found.top] == torch.topk(reference, 4).indices.tolist()
    assert [v for _, v in found.top] == pytest.approx(torch.topk(reference, 4).values.tolist())
    plain = Sampler().sample(logits[None], [state(top_logprobs=0)]).logprobs[0]
    assert plain.top == ()
    assert Sampler().sample(logits[None], [state()]).logprobs == [None]


def test_forced_tokens_count_like_drawn_ones():
    request, logits = state(frequency_penalty=1.0, top_logprobs=0), rows(1)
    result = Sampler().sample(logits, [request], forced=[11])
    assert result.token_ids == [11] and result.logprobs[0].token_id == 11
    assert request.generated_count == 1 and request.reply_ids == [11]
    assert request.adjust(logits[0])[11] == logits[0, 11] - 1.0
