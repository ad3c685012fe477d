"""The messages of a chat, as the model was trained to read them."""

from __future__ import annotations

from typing import Any

from support.tokenizer import DEFAULT_SYSTEM

from .errors import ApiError

ROLES = ("system", "user", "assistant")


def prompt(messages: Any) -> str:
    """Return the text of a conversation in which it is the assistant's turn.

    :raises ApiError: if the messages are malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    turns = [_turn(message, f"messages[{place}]") for place, message in enumerate(messages)]
    if turns[0][0] != "system":
        turns.insert(0, ("system", DEFAULT_SYSTEM))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def _turn(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ApiError(f"{where} must have a role of {', '.join(ROLES)}", param=where)
    return message["role"], _text(message.get("content"), where)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}.content must be text", param=where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(f"{where}.content must have parts of text only", param=where)
    return "".join(part["text"] for part in content)
