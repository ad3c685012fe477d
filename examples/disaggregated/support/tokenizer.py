"""Text to token ids and back: byte-level BPE as SmolLM2 uses it, with the standard library only.

A text goes through four steps:

1. special tokens such as ``<|im_start|>`` are cut out; each is one id;
2. every numeric character is cut out, then GPT-2's pattern cuts the rest into words (a word keeps its
leading space);
3. the UTF-8 bytes of a word become characters of a printable alphabet, one per byte;
4. the best-ranked pair of neighbours is merged, again and again, until no pair of the word is in the merge
list.

Steps 2 to 4 are those of `GPT-2's encoder <https://github.com/openai/gpt-2/blob/master/src/encoder.py>`_;
the separate digits are what llama.cpp calls the ``smollm`` pre-tokenizer.
"""

from __future__ import annotations

import codecs
import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# GPT-2's pattern is written with \p{L} and \p{N}, which the stdlib `re` lacks. Numbers are already cut out
# when it is applied, so "a word character other than _" is exactly \p{L}. And Python counts the separators
# U+001C to U+001F as white space, which Unicode's White_Space property (and so the original pattern) does
# not.
_LETTER = r"[^\W_]"
_SYMBOL = r"(?:[^\w\s]|[_\x1c-\x1f])"
_SPACE = r"[^\S\x1c-\x1f]"
_NOT_SPACE = r"[\S\x1c-\x1f]"
_WORD = re.compile(
    rf"""
      '(?:s|t|re|ve|m|ll|d)      # the ends of English contractions
    | [ ]?{_LETTER}+             # letters, with the space before them
    | [ ]?{_SYMBOL}+             # anything else that shows, likewise
    | {_SPACE}+(?!{_NOT_SPACE})  # white space, but the last one belongs to the next word
    | {_SPACE}+
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Vocabulary:
    """The data of a tokenizer, as it is in the GGUF file."""

    tokens: tuple[str, ...]
    """The spelling of each token, by id: in the printable byte alphabet, or plain text if it is special."""
    merges: tuple[str, ...]
    """``"left right"`` pairs, the best first."""
    special: frozenset[int]
    """Ids of the control tokens, which are matched whole in a text and never made by merging."""


class Tokenizer:
    """An encoder and decoder of text.

    :param vocabulary: tokens and merges, see :func:`weights.load`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._special = vocabulary.special
        self._special_ids = {vocabulary.tokens[token]: token for token in vocabulary.special}
        self._ids = {spelling: token for token, spelling in enumerate(vocabulary.tokens)}
        self._rank = {tuple(pair.split(" ")): rank for rank, pair in enumerate(vocabulary.merges)}
        alphabet = byte_alphabet()
        self._bytes = {character: byte for byte, character in alphabet.items()}
        # SmolLM2 has no token for 21 of the 256 bytes (some control characters and UTF-8 lead bytes that
        # nothing in use starts with). The reference tokenizer drops them before it merges; so do we.
        self._alphabet = {byte: c if c in self._ids else "" for byte, c in alphabet.items()}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        # "(?!)" matches nothing: the pattern of a vocabulary without special tokens.
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._merged = functools.lru_cache(maxsize=1 << 16)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; special tokens written in it become their own ids.

        :raises UnicodeEncodeError: if ``text`` holds a lone surrogate.
        """
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            if piece in self._special_ids:
                ids.append(self._special_ids[piece])
            else:
                for word in split_words(piece):
                    ids.extend(self._merged(word))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        :raises IndexError: if an id is not in the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token stands for: often not whole characters.

        :raises IndexError: if the id is not in the vocabulary.
        """
        if token < 0:
            raise IndexError(f"token id {token} is negative")
        spelling = self._tokens[token]
        if token in self._special:
            return spelling.encode()
        return bytes(self._bytes[character] for character in spelling)

    def is_special(self, token: int) -> bool:
        """Return True for a control token such as ``<|im_end|>``, which a reader doesn't want to see."""
        return token in self._special

    def _merge(self, word: str) -> tuple[int, ...]:
        parts = list("".join(self._alphabet[byte] for byte in word.encode()))
        never = len(self._rank)
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self._rank.get(pair, never))
            if best not in self._rank:
                break
            parts = _join_everywhere(parts, best)
        return tuple(self._ids[part] for part in parts)


class TextStream:
    """A converter of token ids to text as they come: a character appears once all of its bytes are here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while a character is still unfinished.

        :raises IndexError: if the id is not in the vocabulary.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Return U+FFFD if the stream ended inside a character, else an empty text."""
        return self._decoder.decode(b"", final=True)


def chat_prompt(question: str, system: str = DEFAULT_SYSTEM) -> str:
    """Return the text of a conversation in which it is the assistant's turn to answer ``question``.

    This is the template of SmolLM2 Instruct, whose system message is :data:`DEFAULT_SYSTEM` when none is
    given. The model ends its answer with ``<|im_end|>``.
    """
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def split_words(text: str) -> Iterator[str]:
    """Yield the pieces of ``text`` that are merged on their own; joined, they are ``text`` again."""
    for numeric, characters in groupby(text, key=_is_numeric):
        if numeric:
            yield from characters
        else:
            yield from _WORD.findall("".join(characters))


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's one printable character per byte.

    Bytes that are printable Latin-1 characters stand for themselves, the others are numbered from U+0100
    on; the space thus is written as U+0120, the ``Ġ`` seen in token lists.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update({byte: chr(0x100 + number) for number, byte in enumerate(others)})
    return alphabet


def _is_numeric(character: str) -> bool:
    return unicodedata.category(character).startswith("N")


def _join_everywhere(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    index = 0
    while index < len(parts):
        if tuple(parts[index : index + 2]) == pair:
            joined.append(parts[index] + parts[index + 1])
            index += 2
        else:
            joined.append(parts[index])
            index += 1
    return joined
