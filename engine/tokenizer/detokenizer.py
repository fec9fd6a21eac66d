"""From sampled ids to text as it becomes certain, one token at a time, at a cost that does not grow with the reply."""

from __future__ import annotations

from collections.abc import Sequence

from engine.tokenizer.chat_tokenizer import ChatTokenizer
from engine.tokenizer.token_bytes import utf8_decoder

_OPEN_CHARACTER = -1


class Detokenizer:
    """The text of one reply. `stopped` is the stop string that ended it, which is not part of the text.

    Text is held back while a character is incomplete or while it may turn out to be the beginning of a stop string.
    What `push` and `finish` return, joined, is `text`, and is what `ChatTokenizer.decode` makes of all ids pushed (up
    to a stop string).
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = utf8_decoder()
        self._at_start = tokenizer.strips_first_space
        self._ids: list[int] = []
        self._decoded = 0
        self._ends: list[int] = []
        self._final: list[str] = []
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take the next id; the text that became final with it."""
        if self.stopped is not None:
            return ""
        data = self._tokenizer.shown_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        new = self._decoder.decode(data)
        self._decoded += len(new)
        self._ids.append(token_id)
        self._ends.append(_OPEN_CHARACTER if self._decoder.getstate()[0] else self._decoded)
        if not new:
            return ""
        self._held += new
        return self._release(self._certain_length())

    def finish(self) -> str:
        """No more ids will come: the text that was held back as a possible stop string. Half a character is dropped."""
        return self._release(len(self._held))

    @property
    def text(self) -> str:
        """All text that is final."""
        if len(self._final) > 1:
            self._final = ["".join(self._final)]
        return self._final[0] if self._final else ""

    def final_ids(self) -> tuple[int, ...]:
        """Ids that decode to exactly `text`: as many of those pushed as fit, and the rest of the text encoded anew."""
        text = self.text
        count = covered = 0
        for index in range(len(self._ends) - 1, -1, -1):
            if self._ends[index] != _OPEN_CHARACTER and self._ends[index] <= len(text):
                count, covered = index + 1, self._ends[index]
                break
        rest = text[covered:]
        return (*self._ids[:count], *(self._tokenizer.encode_following(rest) if rest else ()))

    def _certain_length(self) -> int:
        """Characters of the held text that no stop string can take back; notes a stop string that is complete."""
        matches = [(self._held.find(stop), stop) for stop in self._stop]
        found = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
        if found:
            # The one that is complete first ends the reply, as if characters had come one by one.
            _, start, self.stopped = min(found)
            return start
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return len(self._held) - longest

    def _release(self, length: int) -> str:
        ready, self._held = self._held[:length], self._held[length:]
        if self.stopped is not None:
            self._held = ""
        if ready:
            self._final.append(ready)
        return ready
