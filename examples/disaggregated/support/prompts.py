"""The prompts of the demo."""

from __future__ import annotations

from itertools import cycle, islice

from .tokenizer import Tokenizer, chat_prompt

SHORT = "What is the capital of France, and what is it known for?"

LONG = """Summarise this story in one sentence.

A restaurant splits its work between two cooks. The first one reads the whole order, chops, weighs and lays \
everything out; that takes a while, but it happens once. The second one stands at the stove and sends out one plate \
after another, and each plate needs all that was laid out before. For years both shared one table, so whenever a \
large order came in, the stove stood still. Then the owner gave each cook a kitchen of their own, with a hatch in the \
wall between them. At first the preparing cook waited until everything was ready and then carried it over in one go, \
while the other one waited. Now each bowl goes through the hatch as soon as it is filled, while the next one is being \
prepared; when the last bowl arrives, the stove is already hot."""


def encode(tokenizer: Tokenizer, text: str, length: int | None = None) -> list[int]:
    """Return the tokens of a chat in which a user says `text`.

    :param length: the number of tokens: `text` is repeated, or cut, until it fits.
    :raises ValueError: if `text` is empty, or if `length` leaves no room for it.
    """
    if not text.strip():
        raise ValueError("the prompt is empty")
    if length is None:
        return tokenizer.encode(chat_prompt(text))
    before, after = (tokenizer.encode(part) for part in chat_prompt("\0").split("\0"))
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(
            f"--length {length} is too short: with what makes a chat of it, a prompt has at least "
            f"{len(before) + len(after) + 1} tokens"
        )
    return [*before, *islice(cycle(tokenizer.encode(f"{text} ")), room), *after]
