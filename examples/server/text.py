"""The text of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from support.tokenizer import TextStream, Tokenizer


class Text:
    """Makes text of tokens as they come, up to the first of some strings.

    :param stops: the strings, not empty, that end the text; they are not a part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self._held = ""

    def feed(self, token: int) -> str:
        """Return the text that is complete with a token, without what may be the beginning of a stop string."""
        return "" if self._tokenizer.is_special(token) else self._take(self._stream.feed(token))

    def finish(self) -> str:
        """Return the text that was held back."""
        text = self._take(self._stream.finish())
        return text if self.stopped else text + self._held

    def _take(self, text: str) -> str:
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest beginning of `stop` with which `text` ends."""
        return next(length for length in range(len(stop) - 1, -1, -1) if text.endswith(stop[:length]))
