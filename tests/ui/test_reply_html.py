"""A page that applies differences has the same HTML as one that was sent everything, whatever got lost on the way."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ui.reply_html import GrowingReply, delta, reply_html

PIECES = [
    "word ", "**bold** ", "*", "`code` ", "`", "\n", "\n\n", "- item\n", "  - deeper\n", "1. one\n", "2. two\n", "2",
    "# Head\n", "===\n", "---\n", "> quote\n", "```python\n", "```\n", "x = '''a\n", "    four\n", "| a | b |\n",
    "|---|---|\n", "$a^2$ ", "$$", "\\[", "\\]\n", "<think>", "</think>", "<b>", "[l](https://a.b) ", "世界 ",
    "👩‍👩‍👧 ", "~~gone~~ ", "\r\n", "\t", " ", "![i](http://x/y) ", "[r]: /url\n", "[r] ", "\\", "&amp; ", "***\n",
    "+ plus\n",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def apply_delta(blocks: list[str], change: dict) -> list[str]:
    """What the page's script does; `keep` counts UTF-16 units, as its strings do."""
    at, keep, add = change["at"], change["keep"], change["add"]
    if not add:
        return blocks[:at]
    first = add[0]
    if at < len(blocks) and keep:
        first = blocks[at].encode("utf-16-le")[: 2 * keep].decode("utf-16-le") + first
    return [*blocks[:at], first, *add[1:]]


def states(text: str, cuts: list[int]) -> list[tuple[str, ...]]:
    growing = GrowingReply()
    return [growing.update(text[:cut]) for cut in cuts]


@given(texts, st.data())
@settings(max_examples=120)
def test_deltas_rebuild_every_state(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=1, max_size=12)))
    versions = [(), *states(text, cuts)]
    page, page_version = [], 0
    for version in range(1, len(versions)):
        if data.draw(st.booleans()):
            continue  # the answer was lost: the page still has what it had
        page = apply_delta(page, delta(versions[page_version], versions[version]))
        page_version = version
        assert page == list(versions[version])


@given(texts, texts)
@settings(max_examples=80)
def test_deltas_between_unrelated_states(left, right):
    old, new = states(left, [len(left)])[0], states(right, [len(right)])[0]
    assert apply_delta(list(old), delta(old, new)) == list(new)


@given(texts, st.data())
@settings(max_examples=200)
def test_sealed_blocks_are_what_a_whole_rendering_gives(text, data):
    """However the text arrived, finished blocks were final when they were sealed."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    growing = GrowingReply()
    for cut in cuts:
        growing.update(text[:cut])
    assert "".join(growing.update(text, final=True)) == reply_html(text)


TRICKY = [
    "text\n$$\nx\n$$word\n\nafter\n",
    "1. one\n\n2. two\n\n3. three\n",
    "- a\n\n- b\n\n  more\n\n- c\n",
    "Title\n===\n\nText\n---\n\n***\n",
    "> a\nlazy\n\n> b\n",
    "text\n| a | b |\n|---|---|\n| 1 | 2 |\n\nafter\n",
    "```\na\n\n\nb\n```\n\nafter\n```",
    "    code\n\n    more\n\nafter\n",
    "$$\na\n$$\n\n$$\nb\n\nc $$\n",
    "- a\n  ```\n  code\n\n  more\n  ```\n- b\n",
    "1. one\n\n12 is a number\n\n+ a\n\n+1\n",
    "<think>\n1. one\n\n2. two\n</think>\n\n1. three\n\n2. four",
    "a\n\n[r]: /url\n\n[r]\n\n\\[\nx\n\\]\n",
    "$$word - item\n- item\n$$",
    "text\n| a\n|---|---|\n",
    "text\n\n$$a\n- b\n c\n> d\n$$\n\nafter\n",
    "> a\n\\[b\n1. c\n- d\n\\] \n\nafter\n",
]


@pytest.mark.parametrize("text", TRICKY)
def test_one_character_at_a_time(text):
    """A line that has only begun may look like something else: "2" after a list is a paragraph until ". " follows."""
    growing = GrowingReply()
    for end in range(len(text)):
        growing.update(text[:end])
    assert "".join(growing.update(text, final=True)) == reply_html(text)


def test_a_text_that_is_replaced_is_rendered_anew():
    growing = GrowingReply()
    growing.update("# One\n\nTwo\n\nThree\n\n")
    assert "".join(growing.update("Other", final=True)) == "<p>Other</p>\n"


WORDS = "the cache keeps one key and one value per token and layer so nothing is computed again".split()  # noqa: SIM905


def kind_of_reply(kind: str, tokens: int) -> str:
    words = [random.Random(7 + index).choice(WORDS) for index in range(tokens)]
    if kind == "paragraph":
        return " ".join(words)
    if kind == "code":
        body = "".join(word + ("\n    " if i % 9 == 8 else " ") for i, word in enumerate(words))
        return '```python\ndef f():\n    """' + body
    if kind == "list":
        return "".join(f"- **{word}**\n" if i % 5 == 0 else f"  {word} `{word}`\n" for i, word in enumerate(words))
    if kind == "formulas":
        return " ".join(f"${word}_{{{i}}}^2$" if i % 6 == 0 else word for i, word in enumerate(words))
    if kind == "thought":
        return "<think>\n" + " ".join(words)
    return "".join(word + ("\n\n" if i % 40 == 39 else " ") for i, word in enumerate(words))


def bytes_sent(text: str, tokens: int) -> int:
    """All differences of a reply that a page asks for twelve times in a hundred tokens."""
    growing, old, total = GrowingReply(), (), 0
    for step in range(1, tokens + 1, 8):
        new = growing.update(text[: len(text) * step // tokens])
        total += len(repr(delta(old, new)).encode())
        old = new
    return total + len(repr(delta(old, growing.update(text))).encode())


@pytest.mark.parametrize("kind", ["paragraph", "code", "list", "formulas", "thought", "blocks"])
def test_bytes_grow_with_the_reply_and_not_with_its_square(kind):
    """Sending the last block whole each time made 600 tokens of one paragraph four times as dear as 300."""
    short, long = (bytes_sent(kind_of_reply(kind, count), count) for count in (300, 600))
    assert long <= 2.5 * short
    assert long <= 6 * len(kind_of_reply(kind, 600)) + 12_000
