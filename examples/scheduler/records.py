"""What the policy and the model exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Part(NamedTuple):
    """Tokens of one sequence, to be computed in a step."""

    number: int
    """The request's, for the timeline."""
    tokens: list[int]
    start: int
    """The position of the first of them."""
    table: Sequence[int]
    """The blocks of the sequence, from position 0 on."""


class Sample(NamedTuple):
    """The token that comes after a part."""

    token: int
    logits: str
    """The digest of the logits, to compare with those of another computation."""


OnLayer = Callable[[int], None]
"""Called in the thread that computes, when the keys and values of a layer are in their blocks."""

Step = Callable[[Sequence[Part], OnLayer | None], list[Sample]]
"""Computes parts of different sequences, and returns a sample for each."""


@dataclass(eq=False)
class Request:
    """A prompt and as much of the answer as there is."""

    number: int
    """Lower numbers came earlier."""
    prompt: list[int]
    max_tokens: int
    stop: int = -1
    """The token that ends the answer."""
    answer: list[Sample] = field(default_factory=list)
    left_batch: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer."""
        return self.prompt + [sample.token for sample in self.answer]

    def end(self, table: Sequence[int]) -> Part:
        """Return the last token, whose sample comes next."""
        tokens = self.tokens
        return Part(self.number, tokens[-1:], len(tokens) - 1, table)

    @property
    def done(self) -> bool:
        """True once the answer is whole."""
        return len(self.answer) == self.max_tokens or (bool(self.answer) and self.answer[-1].token == self.stop)
