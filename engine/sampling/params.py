"""What a person may ask of the sampler, checked once at the border."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.config import KV_FORMATS, SPECULATION
from engine.errors import InvalidRequest

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one reply. `temperature == 0` is greedy decoding.

    `max_tokens` is the most new tokens; None means up to the context limit. `seed` None draws a fresh seed per reply.
    `top_k == 0`, `top_p == 1` and `min_p == 0` switch those filters off; penalties are neutral at 1.0 (repetition)
    and 0.0 (presence, frequency).
    `kv_format` is how its session's keys and values are kept; None: as the engine keeps them.
    `speculation`: whether tokens are guessed and run ahead; None: as the engine does. It changes no token.
    `strip_thoughts`: what earlier replies of the conversation wrote in `<think>` marks is left out of the prompt, also
    where the chat template would keep it.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    kv_format: str | None = None
    speculation: str | None = None
    strip_thoughts: bool = False

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        check_whole("top_k", self.top_k, 0, 2**31)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        if self.seed is not None:
            check_whole("seed", self.seed, 0, MAX_SEED)
        if self.top_logprobs is not None:
            check_whole("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.kv_format is not None and self.kv_format not in KV_FORMATS[1:]:
            known = ", ".join(KV_FORMATS[1:])
            raise InvalidRequest(f"kv_format must be one of {known}, not {_shown(self.kv_format)}.")
        if self.speculation is not None and self.speculation not in SPECULATION:
            raise InvalidRequest(
                f"speculation must be one of {', '.join(SPECULATION)}, not {_shown(self.speculation)}."
            )
        _check_stop(self.stop)
        for token_id, bias in self.logit_bias.items():
            check_whole("logit_bias token id", token_id, 0, 2**31)
            check_number("logit_bias", bias, -1e4, 1e4)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidRequest` if `logit_bias` names a token that the model does not have."""
    for token_id in params.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequest(f"logit_bias names token {token_id}; the model has tokens 0 to {vocab_size - 1}.")


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raises `InvalidRequest`, with the bounds, unless `value` is a whole number from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}.")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raises `InvalidRequest`, with the bounds, unless `value` is a number from `low` to `high`."""
    # Infinity and NaN lie in no range, and a whole number of any size can be compared.
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}.")


def _shown(value: object) -> str:
    """The beginning of a value; Python refuses to write whole numbers of thousands of digits."""
    return "one of that size" if isinstance(value, int) and abs(value) >= 2**128 else f"{value!r:.40}"


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(stop)}.")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequest("stop strings must be non-empty text.")
