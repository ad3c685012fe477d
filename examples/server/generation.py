"""A request on its way through P and D."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from .errors import ApiError
from .messages import Ask, Note


@dataclass(eq=False)
class Generation:
    """A prompt, and as much of the answer as there is."""

    number: int
    prompt: list[int]
    max_tokens: int
    end_token: int
    asked: float = field(default_factory=time.monotonic)
    """The times of the request, of the first layer, of the first and of the last token, and of the end."""
    arriving: float | None = None
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    outcome: str | None = None
    layers: int = 0
    """The number of layers of the sequence that have arrived at D."""
    tries: int = 0
    stopped: bool = False
    """True if no more tokens are wanted."""
    tokens: list[int] = field(default_factory=list)
    _arriving_at: int | None = None
    """The position of these layers: they come again, with more tokens, after a preemption."""
    _error: ApiError | None = None
    _work: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        """True once the answer is whole."""
        return len(self.tokens) == self.max_tokens or self.tokens[-1:] == [self.end_token]

    @property
    def state(self) -> str:
        """What happens to it now, or how it ended."""
        if self.outcome is not None:
            return self.outcome
        return "running" if self.tokens else "arriving" if self.layers else "waiting"

    def rest(self) -> Ask:
        """Return what is to be asked of D: to continue after the tokens that are here."""
        self._arriving_at = None
        return Ask(self.number, self.prompt + self.tokens, self.max_tokens - len(self.tokens))

    def hear(self, note: Note) -> bool:
        """Take what D tells; return True if it is the next token."""
        if note.token is None:
            self.arriving = self.arriving or time.monotonic()
            self.layers = self.layers + 1 if note.position == self._arriving_at else 1
            self._arriving_at = note.position
        elif note.position == len(self.prompt) + len(self.tokens):  # else one before was dropped: D's answer has all
            self.add([note.token])
            return True
        return False

    def add(self, tokens: list[int]) -> None:
        """Add tokens to the answer."""
        if tokens:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.tokens += tokens
            self._changed.set()

    def begin(self, work: asyncio.Task[None]) -> None:
        """Follow the task that brings the tokens."""
        self._work = work
        work.add_done_callback(lambda _: self._changed.set())

    def fail(self, error: ApiError) -> None:
        """End the iteration over the tokens by an error."""
        self._error = error
        self._changed.set()

    async def follow(self) -> AsyncGenerator[int, None]:
        """Iterate over the tokens as they come; the error of the task that brings them ends the iteration."""
        seen = 0
        while True:
            for token in self.tokens[seen:]:
                seen += 1
                yield token
            if self._error is not None:
                raise self._error
            if seen == len(self.tokens):
                assert self._work is not None
                if self._work.done():
                    self._work.result()
                    return
                self._changed.clear()
                await self._changed.wait()
