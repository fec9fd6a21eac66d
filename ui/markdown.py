"""A reply's Markdown as safe HTML. What a model wrote is data: no raw HTML, images, styles or classes of its own."""

from __future__ import annotations

import html
import re
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererProtocol
from markdown_it.rules_block import StateBlock, table
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from ui.formulas import formulas

MAX_HIGHLIGHT_CHARS = 30_000
LANGUAGE = re.compile(r"[\w+#.-]{1,30}")
SAFE_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
_FORMATTER = HtmlFormatter(nowrap=True, classprefix="hl-")


def render_blocks(source: str, growing: bool = False) -> tuple[list[tuple[int, str]], int]:
    """Top-level blocks as `(first line, HTML)`, and the first line that may still become something else.

    That is a line that is not finished, or where a formula may have begun that is not closed.

    With `growing` a code block at the very end is not coloured: a lexer may change its mind about everything after
    an open string, and then each new token would send the whole block again.
    """
    env: EnvType = {"open_code": None, "growing": growing}
    tokens = _MD.parse(source, env)
    if growing:
        last = next((token for token in reversed(tokens) if token.nesting >= 0), None)
        env["open_code"] = last
    blocks: list[tuple[int, str]] = []
    start = 0
    for index, token in enumerate(tokens):
        if token.level == 0 and token.nesting <= 0:
            group = tokens[start : index + 1]
            line = group[0].map[0] if group[0].map else 0
            blocks.append((line, _MD.renderer.render(group, _MD.options, env)))
            start = index + 1
    finished = source.count("\n")
    return blocks, min(finished, env.get("open_line", finished))


@lru_cache(maxsize=2048)
def _highlighted(code: str, language: str) -> str:
    if not language or len(code) > MAX_HIGHLIGHT_CHARS:
        return html.escape(code, quote=False)
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return html.escape(code, quote=False)
    return highlight(code, lexer, _FORMATTER)


def _code(self: RendererProtocol, tokens: list[Token], index: int, options: OptionsDict, env: EnvType) -> str:
    token = tokens[index]
    words = token.info.split()
    language = words[0] if words and LANGUAGE.fullmatch(words[0]) else ""
    if token is env.get("open_code"):
        body = html.escape(token.content, quote=False)
    else:
        body = _highlighted(token.content, language.lower())
    return (
        f'<div class="code"><div class="code-bar"><span>{html.escape(language) or "text"}</span>'
        f'<button type="button" data-copy-code>Copy</button></div><pre tabindex="0"><code>{body}</code></pre></div>\n'
    )


def _image(self: RendererProtocol, tokens: list[Token], index: int, options: OptionsDict, env: EnvType) -> str:
    """An image would be fetched from where the model says; a link is only followed when a person clicks it."""
    token = tokens[index]
    label = html.escape(token.content or "image")
    target = str(token.attrs.get("src", ""))
    if not SAFE_LINK.match(target):
        return f"[{label}]"
    return f'<a href="{html.escape(target)}" rel="noopener noreferrer nofollow" target="_blank">{label} (image)</a>'


def _link_open(self: RendererProtocol, tokens: list[Token], index: int, options: OptionsDict, env: EnvType) -> str:
    href = html.escape(str(tokens[index].attrs.get("href", "")))
    return f'<a href="{href}" rel="noopener noreferrer nofollow" target="_blank">'


def _table(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    """A table begins once its second line is finished: with one more column there it would be none, but text."""
    if state.env.get("growing") and state.eMarks[start_line + 1] == len(state.src):
        return False
    return table(state, start_line, end_line, silent)


def _table_open(self: RendererProtocol, tokens: list[Token], index: int, options: OptionsDict, env: EnvType) -> str:
    return '<div class="table" tabindex="0"><table>\n'


def _table_close(self: RendererProtocol, tokens: list[Token], index: int, options: OptionsDict, env: EnvType) -> str:
    return "</table></div>\n"


def _cell_open(self: RendererProtocol, tokens: list[Token], index: int, options: OptionsDict, env: EnvType) -> str:
    token = tokens[index]
    align = str(token.attrs.get("style", "")).removeprefix("text-align:")
    return f'<{token.tag} align="{align}">' if align in ("left", "center", "right") else f"<{token.tag}>"


def _build() -> MarkdownIt:
    md = MarkdownIt("commonmark", {"html": False, "linkify": False, "maxNesting": 40})
    md.enable(["table", "strikethrough"])
    # A definition far below would change links that were sent long ago; without it finished blocks stay final.
    md.disable(["reference", "html_block", "html_inline"])
    md.validateLink = lambda url: SAFE_LINK.match(url.strip()) is not None  # type: ignore[method-assign]
    md.block.ruler.at("table", _table, {"alt": ["paragraph", "reference"]})
    md.use(formulas)
    for name, rule in {
        "fence": _code,
        "code_block": _code,
        "image": _image,
        "link_open": _link_open,
        "table_open": _table_open,
        "table_close": _table_close,
        "th_open": _cell_open,
        "td_open": _cell_open,
    }.items():
        md.add_render_rule(name, rule)
    return md


_MD = _build()
