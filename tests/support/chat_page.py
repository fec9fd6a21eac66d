"""A person at the page: opens, types, clicks and reads in a real browser. What goes wrong there is written down."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect

WAIT_MS = 60_000
LOCAL_SCHEMES = ("data", "blob", "about")
# Nothing here measures time; a machine with other work to do is no fault.
expect.set_options(timeout=WAIT_MS)


class Visitor:
    """One browser profile. Its `faults` must be empty at the end: errors of scripts, and requests to other hosts."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.expected: list[str] = []
        self.context: BrowserContext = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        self.context.set_default_timeout(WAIT_MS)
        self.context.on("console", self._console)
        self.context.on("weberror", lambda event: self.faults.append(f"script error: {event.error}"))
        self.context.on("request", self._request)

    def expect_errors(self, *parts: str) -> None:
        """Console errors that hold one of these texts are what this test provokes."""
        self.expected += parts

    def open(self, session: str | None = None) -> ChatPage:
        """A new tab with this chat, once the page can be used."""
        tab = ChatPage(self.context.new_page(), self.url)
        tab.go(session)
        return tab

    def close(self) -> None:
        # A handler that is in the middle of a request would raise its error in the next test.
        self.context.unroute_all(behavior="ignoreErrors")
        self.context.close()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(part in message.text for part in self.expected):
            self.faults.append(f"console: {message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        self.requests.append(request.url)
        if parts.scheme not in LOCAL_SCHEMES and parts.netloc != urlsplit(self.url).netloc:
            self.faults.append(f"request to another host: {request.url}")


class ChatPage:
    """One tab."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.box = page.locator("#kv-prompt textarea")
        self.thread = page.locator("#kv-chat .thread")
        self.panel = page.locator("#kv-panel")
        self.title = page.locator("#kv-header button.title")
        self.toasts = page.locator("#kv-overlay .toast")

    def go(self, session: str | None = None) -> None:
        self.page.goto(self.url + (f"/?session={session}" if session else "/"))
        self.ready()

    def ready(self) -> None:
        """Wait for a text box, and for the chat or the greeting of an empty one."""
        expect(self.box).to_be_visible(timeout=WAIT_MS)
        self.page.wait_for_selector("#kv-chat .welcome:not([hidden]), #kv-chat .thread > .message", state="attached")

    def session(self) -> str:
        """The chat that the address names."""
        found = self.page.evaluate("new URL(location.href).searchParams.get('session')")
        assert found, "the address names no chat"
        return str(found)

    # -- typing and waiting

    def send(self, text: str) -> None:
        self.box.fill(text)
        self.box.press("Enter")

    def ask(self, text: str) -> str:
        """Send and wait for the whole reply."""
        count = self.count()
        self.send(text)
        self.idle(count + 2)
        return self.texts()[-1]

    def writing(self, characters: int = 1) -> str:
        """Wait until a reply is being written and has this many characters, and what it has; a short one may be
        over."""
        found = self.page.wait_for_function(
            """n => {
                const text = document.querySelector('.message.live .body')?.textContent.trim() ?? '';
                return document.body.classList.contains('kv-running') && text.length >= n && text;
            }""",
            arg=characters,
        )
        return str(found.json_value())

    def idle(self, count: int | None = None) -> None:
        """Wait until nothing is being written (and, if given, that many messages are there)."""
        self.page.wait_for_function(
            "n => !document.body.classList.contains('kv-running') && !document.querySelector('.message.live')"
            " && (n === null || document.querySelectorAll('.thread > .message').length === n)",
            arg=count,
        )

    # -- reading

    def count(self) -> int:
        return self.thread.locator("> .message").count()

    def texts(self) -> list[str]:
        """The texts of the messages; `textContent`, because what is off screen has no `innerText`."""
        return [text.strip() for text in self.thread.locator("> .message > .body").all_text_contents()]

    def tile(self, label: str) -> str:
        """A number of the last turn in the panel."""
        return (
            self.panel.locator(".tiles > div", has=self.page.get_by_text(label, exact=True)).locator("b").inner_text()
        )

    def cache_pos(self) -> int:
        return int(self.panel.locator(".cache-pos b").inner_text().replace(",", ""))

    # -- acts

    def act(self, index: int, name: str) -> None:
        """Press a button of a message (its `data-act`); negative indices count from the end."""
        message = self.thread.locator("> .message").nth(index)
        message.hover()
        message.locator(f"[data-act={name}]").click()

    def step(self, index: int, direction: str) -> None:
        """Press a branch arrow: "Older" or "Newer"."""
        self.thread.locator("> .message").nth(index).get_by_role("button", name=f"{direction} version").click()

    def versions(self, index: int) -> str:
        return self.thread.locator("> .message").nth(index).locator(".versions").inner_text().strip()

    def rewrite(self, index: int, text: str) -> None:
        """Edit a message and confirm."""
        self.act(index, "edit")
        message = self.thread.locator("> .message").nth(index)
        message.locator("textarea").fill(text)
        message.locator(".edit-bar .accent").click()

    def menu(self, label: str) -> None:
        """Choose from the menu of the open chat."""
        self.page.locator("#kv-header").get_by_role("button", name="Chat menu").click()
        self.page.get_by_role("menuitem", name=label, exact=True).click()

    def confirm(self, text: str | None = None) -> None:
        """Answer the open question with yes, or with a text."""
        dialog = self.page.locator("dialog[open]")
        if text is not None:
            dialog.locator("input").fill(text)
        dialog.locator("button[type=submit]").click()
        expect(dialog).to_have_count(0)

    def tab(self, name: str) -> None:
        self.page.locator("#kv-tabs").get_by_role("tab", name=name).click()
