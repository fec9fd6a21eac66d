"""Text of a reply is data: nothing in it runs, covers the page, or reaches another host."""

from __future__ import annotations

import pytest

from tests.support.app_process import AppProcess
from tests.support.chat_page import Visitor

pytestmark = pytest.mark.e2e
AWAY = "https://beacon.example/x"
HOSTILE = [
    f"![picture]({AWAY}.png) ![ref][r]\n\n[r]: {AWAY}2.png",
    f"<img src='{AWAY}' onerror='window.ran=1'><img src=x onerror=window.ran=2>",
    "<script>window.ran=3</script><script src='https://beacon.example/s.js'></script>",
    "<div style='position:fixed;inset:0;z-index:99999;background:red'>COVER</div>",
    f"<form action='{AWAY}'><input name=q><button>Log in</button></form>",
    "[click](javascript:window.ran=4) [data](data:text/html,<script>1</script>)",
    "<a href='javascript:window.ran=5'>here</a>",
    "<svg onload='window.ran=6'><script>window.ran=7</script></svg>",
    "<svg><a xlink:href='javascript:window.ran=8'><text>x</text></a></svg>",
    f"<iframe src='{AWAY}'></iframe><object data='{AWAY}'></object>",
    "<iframe srcdoc='<script>parent.ran=9</script>'></iframe>",
    f"<meta http-equiv=refresh content='0;url={AWAY}'><base href='{AWAY}'><link rel=stylesheet href='{AWAY}.css'>",
    f"<style>body{{background:url({AWAY})}} * {{display:none}}</style>",
    f"<video src='{AWAY}' autoplay></video><audio src='{AWAY}'></audio><picture><source srcset='{AWAY}'></picture>",
    "$\\href{javascript:window.ran=10}{x}$ and $$\\htmlData{a=b}{x}\\includegraphics{" + AWAY + "}$$",
    "<math><mtext><a href='javascript:window.ran=11'>m</a><img src=x onerror=window.ran=12></mtext></math>",
    "<details open ontoggle='window.ran=13'><summary>s</summary></details>",
    "```html\n</code></pre><script>window.ran=14</script>\n```",
    "```\" onmouseover=\"window.ran=15\nx\n```",
    "<think><img src=x onerror=window.ran=16></think>after",
    f"<{AWAY}> {AWAY} www.beacon.example",
    "<button onclick='window.ran=17' id='kv-send' class='message'>Send</button><dialog open>modal</dialog>",
    "| a |\n|---|\n| <img src=x onerror=window.ran=18> |",
]  # fmt: skip
LOADED = (
    "img, script, iframe, object, embed, form, style, link, meta, base, video, audio, picture, source, input, dialog"
)


@pytest.fixture
def hostile(visitor: Visitor, app: AppProcess):
    """A tab with a chat in which every message and the title are hostile."""
    parts = [*HOSTILE, "\n\n".join(HOSTILE)]
    messages = [pair for part in parts for pair in (("user", part), ("assistant", part))]
    return visitor.open(app.imported(messages, title=HOSTILE[1], system_prompt=HOSTILE[2]))


def test_hostile_text_stays_text(hostile) -> None:
    tab = hostile
    assert tab.count() == 2 * len(HOSTILE) + 2
    tab.tab("Settings")
    tab.tab("Cache")
    # Images, refreshes and requests would come by now; scripts and handlers would have run.
    tab.page.wait_for_timeout(1500)
    assert tab.page.evaluate("window.ran") is None
    assert tab.thread.locator(LOADED).count() == 0
    assert tab.page.frames == [tab.page.main_frame]
    handlers = "nodes => nodes.flatMap(n => n.getAttributeNames().filter(a => a.startsWith('on') || a === 'srcdoc'))"
    assert tab.thread.locator("*").evaluate_all(handlers) == []
    assert tab.page.locator("#kv-send").count() == 1
    assert "COVER" in tab.thread.text_content()


def test_nothing_covers_the_page(hostile) -> None:
    """Nothing a message brings lies outside the conversation, on top of it or of what surrounds it."""
    outside = """nodes => nodes.filter(n => {
        const style = getComputedStyle(n);
        return ['fixed', 'sticky'].includes(style.position) || Number(style.zIndex) > 100;
    }).map(n => n.outerHTML.slice(0, 100))"""
    assert hostile.thread.locator(".body *").evaluate_all(outside) == []
    hit = "([x, y]) => document.elementFromPoint(x, y).closest('#kv-left, #kv-prompt, #kv-right')?.id"
    for name in ("kv-left", "kv-prompt", "kv-right"):
        box = hostile.page.locator(f"#{name}").bounding_box()
        assert hostile.page.evaluate(hit, [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]) == name


def test_links_of_a_reply(hostile) -> None:
    """Only to the web or to mail, in another tab, which learns nothing of this one."""
    read = "links => links.map(a => [a.href || a.getAttribute('xlink:href'), a.target, a.rel])"
    links = hostile.thread.locator(".body a").evaluate_all(read)
    assert links
    for address, target, relation in links:
        assert address.startswith(("http://", "https://", "mailto:")), address
        assert target == "_blank" and "noopener" in relation and "noreferrer" in relation


def test_a_live_reply_is_data_too(visitor: Visitor, app: AppProcess) -> None:
    """What is being written goes another way into the page than what is stored."""
    tab = visitor.open(app.session(max_tokens=2500))
    tab.send("Repeat exactly: <img src=x onerror=alert(1)> <b>bold</b>")
    tab.writing(100)
    assert tab.thread.locator(".message.live").locator(LOADED).count() == 0
    tab.page.keyboard.press("Escape")
    tab.idle(2)
    assert tab.thread.locator(LOADED).count() == 0
    assert tab.texts()[0] == "Repeat exactly: <img src=x onerror=alert(1)> <b>bold</b>"


def test_content_policy_stops_what_would_get_through(visitor: Visitor) -> None:
    """Even markup put into the page by force can't load anything from elsewhere."""
    visitor.expect_errors("beacon.example", "Content Security Policy")
    tab = visitor.open()
    answers = []
    visitor.context.on("response", lambda response: answers.append(response.url))
    visitor.context.route("https://beacon.example/**", lambda route: route.fulfill(body="reached"))
    blocked = tab.page.evaluate(
        """async (away) => {
            const blocked = [];
            document.addEventListener('securitypolicyviolation', (event) => blocked.push(event.effectiveDirective));
            document.body.append(Object.assign(document.createElement('img'), {src: away}));
            await fetch(away).catch(() => null);
            await new Promise((done) => setTimeout(done, 300));
            return blocked;
        }""",
        AWAY,
    )
    assert {"img-src", "connect-src"} <= set(blocked)
    assert not [url for url in answers if "beacon" in url]
    visitor.faults = [fault for fault in visitor.faults if "beacon.example" not in fault]
