"""Draws tokens where the logits are: settings go to the device in one copy, ids come back in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.cuda_graph import padded_rows
from engine.sampling.row_states import RowStates, needs_row
from engine.sampling.sampler import SamplingState
from engine.sampling.step import Drafts, Forced, StepOutput, StepTokens
from kernels.gpu.sample import sample, scratch_width
from kernels.reference.sampling import NOT_FINITE, SETTINGS

_NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}


class DeviceSampler:
    """The samplers' step in three parts: `prepare` before the model, `launch` after it (a CUDA graph may hold both),
    `tokens` to wait for the result. Tensors keep their addresses. A request gets what `Sampler` would give it.

    Requests that the kernel has no means for (`_draws`) run along greedily and are then drawn in torch.
    """

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        """`max_rows`: the most rows of logits in a step, padding included."""
        self._vocab_size, self._device, self._max_rows = vocab_size, device, max_rows
        rest = torch.tensor([[_NEUTRAL.get(name, 0.0) for name in SETTINGS]] * max_rows, dtype=torch.float64)
        self._host = rest.pin_memory() if device.type == "cuda" else rest.clone()
        self._values = self._host.numpy()
        self._rest = rest.to(device)
        self._settings = self._rest.clone()
        self._scratch = torch.zeros(max_rows, scratch_width(vocab_size), dtype=torch.int64, device=device)
        self._out = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._shared = RowStates(1, vocab_size, device)
        self._own: RowStates | None = None
        self._greedy, self._uses_own = True, False

    @property
    def variant(self) -> tuple[bool, int]:
        """What a captured `launch` holds: whether all rows are greedy, and the rows of the states it reads and writes.

        States that grew lie elsewhere, and have more rows than any that a graph was captured with.
        """
        return self._greedy, len(self._states().seen)

    def verifies(self, state: SamplingState) -> bool:
        """Whether several rows of this request may be drawn in one step: what earlier tokens of it count for is only
        known once these are drawn."""
        return self._draws(state, None) and not needs_row(state)

    def prepare(self, requests: Sequence[SamplingState], forced: Forced, drafts: Drafts | None = None) -> None:
        """Send the settings of a step's rows on their way to the device; rows beyond them are padding. Drafts belong to
        requests that it `verifies`."""
        if not requests:
            return
        rows = [state if self._draws(state, forced[row]) else None for row, state in enumerate(requests)]
        self._greedy = all(state is None or state.params.temperature == 0 for state in rows)
        wanting = sum(state is not None and needs_row(state) for state in rows)
        self._uses_own = wanting > 0
        if self._own is not None:
            self._own.keep(requests)
        self._make_room(wanting)
        self._values[:] = [_NEUTRAL.get(name, 0.0) for name in SETTINGS]
        ahead = 0
        for row, state in enumerate(rows):
            ahead = ahead + 1 if drafts is not None and drafts[row] is not None else 0
            if state is not None:
                self._values[row] = self._settings_of(state, ahead)
        self._settings.copy_(self._host, non_blocking=True)

    def launch(self, hidden: Tensor, logits: Tensor, meta: AttentionMetadata) -> Tensor:
        """int64 on the device, valid until the next call: the token of each row of logits, `NOT_FINITE` if one is not;
        then a flag per sequence, 1 if its hidden states are finite, where a batch has tokens without logits.

        Every logit is a sum over the whole hidden row: where each token has logits these tell enough.
        """
        rows = len(logits)
        states = self._states()
        out, scratch, settings = self._out[:rows], self._scratch[:rows], self._settings[:rows]
        sample(logits, settings, states.seen, states.counts, states.bias, scratch, out, self._greedy)
        if len(hidden) == rows:
            return out
        bad = torch.isfinite(hidden).all(dim=-1).logical_not().cumsum(0)
        until = bad[meta.cu_seqlens_q[1:] - 1]
        return torch.cat((out, until.diff(prepend=until.new_zeros(1)) == 0))

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, launches of any variant count no token into a request's state."""
        self._settings.copy_(self._rest)
        yield
        self._settings.copy_(self._host, non_blocking=True)

    def tokens(
        self,
        drawn: Tensor,
        output: StepOutput,
        requests: Sequence[SamplingState],
        forced: Forced,
        drafts: Drafts | None = None,
    ) -> StepTokens:
        """Wait for what `launch` returned: the step's one copy to the host."""
        values, count = drawn.tolist(), len(requests)
        tokens = StepTokens([bool(flag) for flag in values[count:]] or [True] * len(output.query_lens), count)
        tokens.drop(index for row, index in enumerate(output.wanted) if values[row] == NOT_FINITE)
        left = []
        for row, index in enumerate(output.wanted):
            if drafts is not None and drafts[row] is not None and tokens.token_ids[row - 1] != drafts[row]:
                continue
            if tokens.finite[index] and self._draws(requests[row], forced[row]):
                tokens.token_ids[row] = values[row]
                requests[row].accept(values[row])
                if self._own is not None:
                    self._own.count(requests[row])
            elif tokens.finite[index]:
                left.append(row)
        tokens.draw(left, output, requests, forced)
        return tokens

    def _draws(self, state: SamplingState, forced: int | None) -> bool:
        """Log probabilities, hooks and ids that are given need torch, and so does a bias that may ban every token."""
        params = state.params
        may_ban_all = len(params.logit_bias) == self._vocab_size
        return forced is None and params.top_logprobs is None and not state.hooks and not may_ban_all

    def _settings_of(self, state: SamplingState, ahead: int) -> list[float]:
        """In the order of `SETTINGS`."""
        params = state.params
        return [
            state.next_uniform(ahead) if params.temperature else 0.0,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            bool(params.logit_bias),
            self._states().row_of(state) if needs_row(state) else 0,
        ]

    def _states(self) -> RowStates:
        """Those that the step's rows point into."""
        return self._own if self._own is not None and self._uses_own else self._shared

    def _make_room(self, wanting: int) -> None:
        """At a large vocabulary a row takes more than a megabyte: there are as many as were ever wanted, padded."""
        if wanting and (self._own is None or wanting >= len(self._own.seen)):
            self._own = RowStates(min(padded_rows(wanting), self._max_rows) + 1, self._vocab_size, self._device)
