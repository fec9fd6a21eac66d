"""LaTeX formulas in Markdown: recognised while parsing, turned into MathML that holds nothing but MathML."""

from __future__ import annotations

import html
import re
from functools import lru_cache
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererProtocol
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

MAX_FORMULA_CHARS = 2000
MAX_DEPTH = 40
INLINE_CLOSERS = {"$$": "$$", "\\(": "\\)", "\\[": "\\]"}
# One dollar is a formula only where it can't be money: no blank inside the marks, no digit after the closing one.
SINGLE_DOLLAR = re.compile(r"\$(?![\s$])((?:\\.|[^$\\\n])+?)(?<![\s\\])\$(?![\d$])")
TAGS_LIST = (
    "math mrow mi mn mo ms mtext mspace mfrac msqrt mroot mstyle merror mpadded mphantom mfenced menclose msub msup "
    "msubsup munder mover munderover mmultiscripts mprescripts none mtable mtr mtd mlabeledtr semantics"
)
TAGS = frozenset(TAGS_LIST.split())
ATTRIBUTES_LIST = (
    "display displaystyle scriptlevel mathvariant stretchy fence form separator accent accentunder linethickness "
    "columnalign rowalign columnlines rowlines columnspacing rowspacing width height depth lspace rspace minsize "
    "maxsize movablelimits symmetric largeop notation"
)
ATTRIBUTES = frozenset(ATTRIBUTES_LIST.split())
PLAIN_VALUE = re.compile(r"[\w\s.%+-]{0,60}")


def formulas(md: MarkdownIt) -> None:
    """Plugin: `$$..$$`, `\\[..\\]`, `\\(..\\)` and unambiguous `$..$`."""
    md.block.ruler.before("fence", "formula_block", _block_rule, {"alt": ["paragraph", "blockquote", "list"]})
    md.inline.ruler.before("escape", "formula", _inline_rule)
    md.add_render_rule("formula", _render)
    md.add_render_rule("formula_block", _render)


@lru_cache(maxsize=1024)
def mathml(source: str, display: bool) -> str:
    """The formula as MathML, or its source as escaped text where it can't be understood."""
    try:
        if len(source) > MAX_FORMULA_CHARS or _nesting(source) > MAX_DEPTH:
            raise ValueError("too large")
        body = _serialise(convert_to_element(source, display="block" if display else "inline"), 0)
    except Exception:
        # The converter's failures have no common class; whatever it does not understand is shown as it was written.
        marks = ("$$", "$$") if display else ("$", "$")
        return f'<code class="formula-source">{html.escape(marks[0] + source + marks[1])}</code>'
    return f'<span class="formula">{body}</span>' if display else body


def _nesting(source: str) -> int:
    deepest = depth = 0
    for char in source:
        depth += (char == "{") - (char == "}")
        deepest = max(deepest, depth)
    return deepest + source.count("\\left") + source.count("\\begin")


def _serialise(node: Element, depth: int) -> str:
    """Write known MathML only. The converter leaves `<` of a `\\text{}` as it is, so its own output is never used."""
    if node.tag not in TAGS or depth > 4 * MAX_DEPTH:
        raise ValueError(node.tag)
    text = html.unescape(node.text or "")
    if text.startswith("\\"):
        raise ValueError("unknown command")
    attributes = "".join(
        f' {name}="{html.escape(value)}"'
        for name, value in node.attrib.items()
        if name in ATTRIBUTES and PLAIN_VALUE.fullmatch(value)
    )
    inner = html.escape(text, quote=False) + "".join(_serialise(child, depth + 1) for child in node)
    return f"<{node.tag}{attributes}>{inner}</{node.tag}>"


def _inline_rule(state: StateInline, silent: bool) -> bool:
    source, start = state.src, state.pos
    opener = source[start : start + 2]
    closer = INLINE_CLOSERS.get(opener)
    if closer is not None:
        end = source.find(closer, start + 2, state.posMax)
        if end < 0 or not source[start + 2 : end].strip():
            return False
        return _push(state, silent, source[start + 2 : end], end + 2, opener in ("$$", "\\["))
    match = SINGLE_DOLLAR.match(source, start, state.posMax)
    if match is None:
        return False
    return _push(state, silent, match.group(1), match.end(), False)


def _push(state: StateInline, silent: bool, source: str, end: int, display: bool) -> bool:
    if not silent:
        token = state.push("formula", "", 0)
        token.content, token.meta = source.strip(), {"display": display}
    state.pos = end
    return True


def _block_rule(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    """A formula that stands alone: opens a line, closes at a line's end, and has no blank line in it.

    Where the text ends before it is known, the first such line is noted as `env["open_line"]`.
    """
    first = _line(state, start_line)
    closer = {"$$": "$$", "\\[": "\\]"}.get(first[:2])
    if closer is None or state.is_code_block(start_line):
        return False
    lines: list[str] = []
    for line_number in range(start_line, end_line):
        line = _line(state, line_number)
        unfinished = state.eMarks[line_number] == len(state.src)
        if not line or (line_number > start_line and state.sCount[line_number] < state.blkIndent):
            return _still_open(state, start_line) if unfinished else False
        lines.append(line[2:] if line_number == start_line else line)
        at = lines[-1].find(closer)
        if at < 0:
            continue
        # What may still follow on the line would make it part of the paragraph above.
        if lines[-1][at + 2 :].strip():
            return False
        if unfinished and state.env.get("growing"):
            return _still_open(state, start_line)
        lines[-1] = lines[-1][:at]
        return _push_block(state, silent, "\n".join(lines).strip(), start_line, line_number + 1)
    return _still_open(state, start_line) if end_line == len(state.bMarks) - 1 else False


def _still_open(state: StateBlock, line: int) -> bool:
    """No formula yet, but what has not come may make it one, of all lines from here on."""
    state.env["open_line"] = min(line, state.env.get("open_line", line))
    return False


def _push_block(state: StateBlock, silent: bool, source: str, start_line: int, next_line: int) -> bool:
    if not source:
        return False
    if not silent:
        token = state.push("formula_block", "", 0)
        token.content, token.meta, token.map = source, {"display": True}, [start_line, next_line]
        state.line = next_line
    return True


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]].rstrip()


def _render(self: RendererProtocol, tokens: list[Token], index: int, options: OptionsDict, env: EnvType) -> str:
    token = tokens[index]
    return mathml(token.content, token.meta["display"])
