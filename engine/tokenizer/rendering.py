"""Where each message's text stands in what a chat template made of a conversation.

A template is a program, so the places are found by asking it: once with the real contents, once with a marker in each
content's place. The markers show what the template puts between the contents, and whether it altered one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.errors import InvalidRequest
from engine.tokenizer.token_bytes import well_formed

# Unicode noncharacters: no text uses them, no template looks for them, and trimming leaves them alone.
_OPEN, _CLOSE, _SLOT, _SLOT_END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_NONCHARACTERS = re.compile("[\ufdd0-\ufdd4]")
_SLOTS = re.compile(f"{_SLOT}([0-9]+){_SLOT_END}")
_THINK_END = "</think>"
_MARKED_KEPT = 2048

RenderTexts = Callable[[Sequence[str]], str]
"""Renders the conversation with these contents in place of its own."""


@dataclass(frozen=True, slots=True)
class Region:
    """Characters `start:end` of a rendered text show message `message`; `verbatim` if they are its whole content."""

    message: int
    start: int
    end: int
    verbatim: bool


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`literals` are ranges that people typed and that only look like control tokens."""

    text: str
    regions: tuple[Region, ...]
    literals: tuple[tuple[int, int], ...]


def render_chat(
    contents: Sequence[str], render: RenderTexts, control_tokens: re.Pattern[str], generation_prompt: RenderTexts | None
) -> RenderedChat:
    """Render and find every content. Without `generation_prompt`, the text ends where the last content ends.

    Regions are in the order of the text; contents that can't be told apart from what the template wrote have none.
    """
    marked = [_mark(control_tokens, text) for text in contents]
    full_render = generation_prompt or render
    text = full_render(marked)
    regions = tuple(_align(text, marked, full_render))
    if generation_prompt is None:
        text, regions = _cut_after_last(text, regions, marked)
    if _OPEN not in text and _CLOSE not in text:
        return RenderedChat(text, regions, ())
    return _unmark(text, regions)


@lru_cache(_MARKED_KEPT)
def _mark(control_tokens: re.Pattern[str], content: str) -> str:
    return control_tokens.sub(f"{_OPEN}\\g<0>{_CLOSE}", _NONCHARACTERS.sub("", well_formed(content)))


def _align(text: str, contents: list[str], render: RenderTexts) -> Iterator[Region]:
    """Walk through the text along the skeleton; stops where the template's own words depend on the contents."""
    slots = [f"{_SLOT}{index}{_SLOT_END}" for index in range(len(contents))]
    try:
        skeleton = render(slots)
    except InvalidRequest:
        return
    between = _SLOTS.split(skeleton)
    position = len(between[0])
    if not text.startswith(between[0]):
        return
    for part in range(1, len(between), 2):
        message, following = int(between[part]), between[part + 1]
        is_last = part + 2 == len(between)
        for shown in _guesses(contents[message]):
            if _fits(text, shown, following, position, is_last):
                break
        else:
            altered = _shown_alone(message, contents, slots, skeleton, render)
            if altered is None or not _fits(text, altered, following, position, is_last):
                return
            shown = altered
        end = position + len(shown)
        yield Region(message, position, end, verbatim=shown == contents[message])
        position = end + len(following)


def _fits(text: str, shown: str, following: str, position: int, is_last: bool) -> bool:
    expected = shown + following
    return text.startswith(expected, position) and (not is_last or position + len(expected) == len(text))


def _guesses(content: str) -> Iterator[str]:
    """What templates commonly make of a content, most likely first."""
    yield content
    yield content.strip()
    yield content.rstrip()
    yield content.lstrip()
    if _THINK_END in content:
        answer = content.rsplit(_THINK_END, 1)[1]
        yield answer
        yield answer.lstrip("\n")
        yield answer.strip()


def _shown_alone(message: int, contents: list[str], slots: list[str], skeleton: str, render: RenderTexts) -> str | None:
    """What the template makes of one content, by showing it that one among markers; None if more than that changed."""
    before, slot, after = skeleton.partition(slots[message])
    try:
        alone = render([*slots[:message], contents[message], *slots[message + 1 :]])
    except InvalidRequest:
        return None
    if not slot or not alone.startswith(before) or not alone.endswith(after) or len(alone) < len(before) + len(after):
        return None
    return alone[len(before) : len(alone) - len(after)]


def _cut_after_last(text: str, regions: tuple[Region, ...], contents: list[str]) -> tuple[str, tuple[Region, ...]]:
    """A reply that is to be continued ends the prompt: nothing that the template puts behind it stays."""
    last = len(contents) - 1
    if regions and regions[-1].message == last:
        return text[: regions[-1].end], regions
    wanted = contents[last].strip()
    start = text.rfind(wanted)
    if not wanted or start < 0:
        raise InvalidRequest("The chat template does not show the last message, so it can't be continued.")
    return text[: start + len(wanted)], regions


def _unmark(text: str, regions: tuple[Region, ...]) -> RenderedChat:
    """Take the marks out again and move every position accordingly."""
    marks = [match.start() for match in re.finditer(f"[{_OPEN}{_CLOSE}]", text)]

    def moved(position: int) -> int:
        return position - sum(1 for mark in marks if mark < position)

    literals = tuple((moved(match.start()), moved(match.end())) for match in re.finditer(f"{_OPEN}[^{_CLOSE}]*", text))
    plain = text.replace(_OPEN, "").replace(_CLOSE, "")
    shifted = (Region(r.message, moved(r.start), moved(r.end), r.verbatim) for r in regions)
    return RenderedChat(plain, tuple(shifted), literals)
