"""A growing reply as a list of HTML blocks, and what changed between two states of it.

Finished blocks are rendered once and never again; only the last one is. A page is sent the difference between what it
has and what there is, so that a reply costs bytes in proportion to its length.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import takewhile

from ui.markdown import render_blocks
from ui.thoughts import OPEN, split_thinking

Blocks = tuple[str, ...]


class GrowingMarkdown:
    """Renders text that usually only grows."""

    def __init__(self) -> None:
        self._sealed_text = ""
        self._sealed: list[str] = []

    def update(self, text: str, final: bool = False) -> Blocks:
        """HTML of the top-level blocks of `text`."""
        if not text.startswith(self._sealed_text):
            self._sealed_text, self._sealed = "", []
        rest = text[len(self._sealed_text) :]
        blocks, open_line = render_blocks(rest, growing=not final)
        self._seal(rest, blocks, open_line)
        return (*self._sealed, *(html for _, html in blocks))

    def _seal(self, rest: str, blocks: list[tuple[int, str]], open_line: int) -> None:
        """Whatever comes can only change the last block before the open line, or what that line has cut off from it."""
        starts = [index for index, (line, _) in enumerate(blocks) if line < open_line]
        if not starts or starts[-1] == 0:
            return
        first_open = starts[-1]
        offset = 0
        for _ in range(blocks[first_open][0]):
            offset = rest.index("\n", offset) + 1
        self._sealed_text += rest[:offset]
        self._sealed += [html for _, html in blocks[:first_open]]
        del blocks[:first_open]


class GrowingReply:
    """The same for a whole reply: parts in `<think>` marks are folded, the rest is Markdown."""

    def __init__(self) -> None:
        self._parts: list[GrowingMarkdown] = []

    def update(self, text: str, final: bool = False) -> Blocks:
        blocks: list[str] = []
        if not final and OPEN.startswith(text.strip()):
            return ()
        text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")
        for index, (thinking, closed, part) in enumerate(split_thinking(text)):
            if index == len(self._parts):
                self._parts.append(GrowingMarkdown())
            rendered = self._parts[index].update(part, final or closed)
            if thinking:
                blocks.append(_folded(rendered, closed or final))
            else:
                blocks += rendered
        return tuple(blocks)


def _folded(blocks: Blocks, closed: bool) -> str:
    # The mark of an open thought comes last, so that closing it does not change what was sent before.
    mark = "" if closed else '<i class="thinking"></i>'
    return f'<details class="think"><summary>Thoughts</summary><div>{"".join(blocks)}</div>{mark}</details>'


@lru_cache(maxsize=512)
def reply_html(text: str) -> str:
    """A finished reply."""
    return "".join(GrowingReply().update(text, final=True))


def delta(old: Blocks, new: Blocks) -> dict[str, object]:
    """`{at, keep, add}`: keep the first `at` blocks and `keep` UTF-16 units of the next, then append `add`.

    `add[0]` completes block `at`; further items are blocks of their own. UTF-16 is what the page's strings count in.
    """
    at = _common(old, new)
    if at == len(new) or at == len(old):
        return {"at": at, "keep": 0, "add": list(new[at:])}
    keep = _common(old[at], new[at])
    kept_units = len(new[at][:keep].encode("utf-16-le")) // 2
    return {"at": at, "keep": kept_units, "add": [new[at][keep:], *new[at + 1 :]]}


def _common(left: Blocks | str, right: Blocks | str) -> int:
    """Length of the common beginning."""
    if isinstance(left, str) and isinstance(right, str):
        return _common_chars(left, right)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _common_chars(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
