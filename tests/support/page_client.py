"""A page without a browser: asks the live route and applies the answers as the page's script does."""

from __future__ import annotations

import time
from typing import Any

from fastapi.testclient import TestClient

from ui.chat import ChatService


class Refused(Exception):
    """The server's error answer: `status` and the sentence."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.status, self.code = status, error["code"]


class PageClient:
    """One open page. `bytes` counts what it was sent."""

    def __init__(self, http: TestClient, chat: ChatService, session: str = "new") -> None:
        self.http, self.chat, self.session = http, chat, session
        self.since = ""
        self.parts: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self.blocks: list[str] = []
        self.panel: dict[str, Any] = {}
        self.turn_id: str | None = None
        self.running = False
        self.bytes = 0

    def open(self, session: str) -> PageClient:
        """Another tab."""
        return PageClient(self.http, self.chat, session)

    def act(self, name: str, **body: Any) -> dict[str, Any]:
        return self._checked(self.http.post(f"/api/sessions/{self.session}/acts", json={"act": name, **body}))

    def send(self, content: str, **body: Any) -> None:
        self.session = self.act("send", content=content, **body)["session"]

    def poll(self, lose: bool = False, **query: Any) -> dict[str, Any]:
        """Ask once; with `lose` the answer never arrives."""
        response = self.http.get(f"/api/sessions/{self.session}/live", params={"since": self.since, **query})
        answer = self._checked(response)
        if lose:
            return answer
        self.bytes += len(response.content)
        self.since, self.running = answer["since"], answer["running"]
        self.parts |= {name: answer[name] for name in ("app", "session", "sessions") if name in answer}
        if "branch" in answer:
            self.messages = self.messages[: answer["branch"]["keep"]] + answer["branch"]["add"]
        if "turn" in answer:
            self._take_turn(answer["turn"])
        for name, value in answer.get("panel", {}).items():
            is_list = isinstance(value, dict) and set(value) == {"keep", "add"}
            self.panel[name] = self.panel.get(name, [])[: value["keep"]] + value["add"] if is_list else value
        return answer

    def until_idle(self, pause_s: float = 0.01, **query: Any) -> None:
        deadline = time.monotonic() + 20
        self.poll(**query)
        while self.running:
            assert time.monotonic() < deadline, "the turn does not end"
            time.sleep(pause_s)
            self.poll(**query)

    @property
    def live_html(self) -> str:
        return "".join(self.blocks)

    def _take_turn(self, turn: dict[str, Any]) -> None:
        if turn["id"] != self.turn_id:
            self.turn_id, self.blocks = turn["id"], []
        at, keep, add = turn["at"], turn["keep"], turn["add"]
        if not add:
            self.blocks = self.blocks[:at]
            return
        head = self.blocks[at].encode("utf-16-le")[: 2 * keep].decode("utf-16-le") if keep else ""
        self.blocks = [*self.blocks[:at], head + add[0], *add[1:]]

    def _checked(self, response: Any) -> dict[str, Any]:
        body: dict[str, Any] = response.json()
        if response.status_code != 200:
            raise Refused(response.status_code, body["error"])
        return body
