"""Chat templates: from model files (strangers' code, so only in transformers' sandbox) or bundled by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from engine.errors import InvalidRequest

OWN = "model"
"""Name of the template that came with the model."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""What may be rendered. No route takes "tool" any more, but chats that hold such a message can be continued."""
_PROBE = "\ufdd4"

_ALTERNATE = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = none %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
)
_BUNDLED = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-3": (
        "{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n'"
        " + message.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "llama-2": (
        _ALTERNATE + "{% if message.role == 'user' %}{{ ('' if loop.first else bos_token) + '[INST] ' }}"
        "{% if loop.first and system is not none %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
        "{{ message.content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral": (
        _ALTERNATE + "{% if message.role == 'user' %}{{ '[INST] ' }}"
        "{% if loop.first and system is not none %}{{ system + '\n\n' }}{% endif %}{{ message.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message.role | capitalize + ': ' + message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
# Markers that must each be one id for a bundled template to be the fallback; the first that fits is taken.
_MARKERS = (
    ("chatml", ("<|im_start|>", "<|im_end|>")),
    ("llama-3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    ("mistral", ("[INST]", "[/INST]")),
    ("zephyr", ("<|user|>", "<|assistant|>")),
)


def bundled_names() -> tuple[str, ...]:
    return tuple(_BUNDLED)


def fallback_name(single_ids: Mapping[str, int]) -> str:
    """The bundled template whose role markers are all in the vocabulary; else "plain" (`User: ...\n\nAssistant:`)."""
    for name, markers in _MARKERS:
        if all(marker in single_ids for marker in markers):
            return name
    return "plain"


class ChatTemplate:
    """A compiled template with the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, name: str, source: str, special_tokens: Mapping[str, str]) -> None:
        self.name = name
        self.source = source
        self._special_tokens = {"bos_token": "", "eos_token": "", **special_tokens}

    @classmethod
    def bundled(cls, name: str, special_tokens: Mapping[str, str], starts_with_bos: bool) -> ChatTemplate:
        """A template of our own. Raises `InvalidRequest` for an unknown name."""
        if name not in _BUNDLED:
            raise InvalidRequest(f"There is no chat template {name!r}; there are {', '.join(_BUNDLED)}.")
        return cls(name, ("{{ bos_token }}" if starts_with_bos else "") + _BUNDLED[name], special_tokens)

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that decides what is rendered."""
        text = repr((self.source, sorted(self._special_tokens.items())))
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]

    def render(self, messages: Sequence[Mapping[str, str]], date: datetime, add_generation_prompt: bool) -> str:
        """Text of a conversation. `date` is all that the template can learn of the time. Raises `InvalidRequest`."""
        try:
            text: str = _compile_jinja_template(self.source).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                strftime_now=date.strftime,
                date_string=date.strftime("%d %b %Y"),
                **self._special_tokens,
            )
        except TemplateError as error:
            reason = str(error.message or type(error).__name__).strip().rstrip(".")
            raise InvalidRequest(f"The chat template does not accept this conversation: {reason}.") from error
        except Exception as error:  # any fault of a template is a fault of this request, never of the app
            reason = type(error).__name__
            raise InvalidRequest(f"The chat template fails on this conversation ({reason}).") from error
        return text

    @cached_property
    def supports_system(self) -> bool:
        """Whether a system message shows up in what the template renders."""
        probe = ({"role": "system", "content": _PROBE}, {"role": "user", "content": "x"})
        try:
            return _PROBE in self.render(probe, datetime(2000, 1, 1), True)
        except InvalidRequest:
            return False
