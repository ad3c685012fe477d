"""An answer in OpenAI's form: whole, or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from support.tokenizer import Tokenizer

from .connection import Receive, while_connected
from .errors import ApiError
from .generation import Generation
from .parameters import Parameters
from .router import Router
from .text import Text

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""ASGI's function to send something to the client."""

JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"


class Piece(NamedTuple):
    """A piece of the answer."""

    text: str
    tokens: list[int]
    reason: str | None = None
    """Why the answer ends with it: "stop" or "length"."""


class Answer:
    """The answer to a request: an ASGI application that sends it.

    :param model: the name of the model.
    """

    def __init__(self, parameters: Parameters, router: Router, tokenizer: Tokenizer, model: str) -> None:
        self._parameters = parameters
        self._router = router
        self._text = Text(tokenizer, parameters.stops)
        kind = "chat.completion" if parameters.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if parameters.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if parameters.chat and parameters.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Send it; when the client disconnects, the request is cancelled."""
        await while_connected(receive, (self._send_stream if self._parameters.stream else self._send_whole)(send))

    async def _send_whole(self, send: Send) -> None:
        async with self._router.generation(self._parameters.prompt, self._parameters.max_tokens) as generation:
            pieces = [piece async for piece in self._pieces(generation)]
        whole = Piece(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.tokens],
            pieces[-1].reason,
        )
        body = json.dumps(self._body(whole, self._usage(generation))).encode()
        await _start(send, JSON, [(b"content-length", str(len(body)).encode())])
        await _more(send, body, last=True)

    async def _send_stream(self, send: Send) -> None:
        started = False
        async with self._router.generation(self._parameters.prompt, self._parameters.max_tokens) as generation:
            try:
                async with aclosing(self._pieces(generation)) as pieces:
                    async for piece in pieces:
                        body = self._body(piece)
                        if not started:  # an error before is an HTTP status
                            await _start(send, EVENTS, [(b"cache-control", b"no-cache")])
                            if self._parameters.chat:
                                body["choices"][0]["delta"]["role"] = "assistant"
                            started = True
                        await _more(send, _event(body))
            except ApiError as error:
                if not started:
                    raise
                await _more(send, _event(error.body), last=True)
                return
        if self._parameters.usage:
            await _more(send, _event({**self._head, "choices": [], "usage": self._usage(generation)}))
        await _more(send, b"data: [DONE]\n\n", last=True)

    async def _pieces(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        text = self._text
        async with aclosing(generation.follow()) as tokens:
            async for token in tokens:
                yield Piece(text.feed(token), [token])
                if text.stopped:
                    break
        rest = "" if text.stopped else text.finish()
        generation.stopped = text.stopped
        ended = text.stopped or generation.tokens[-1] == generation.end_token
        yield Piece(rest, [], "stop" if ended else "length")

    def _body(self, piece: Piece, usage: dict[str, int] | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": piece.reason, "logprobs": None}
        if not self._parameters.chat:
            choice["text"] = piece.text
        elif self._parameters.stream:
            choice["delta"] = {"content": piece.text}
        else:
            choice["message"] = {"role": "assistant", "content": piece.text}
        if self._parameters.token_ids:
            choice["token_ids"] = piece.tokens
        return {**self._head, "choices": [choice], **({} if usage is None else {"usage": usage})}

    def _usage(self, generation: Generation) -> dict[str, int]:
        prompt, answer = len(generation.prompt), len(generation.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


async def _start(send: Send, kind: str, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode()), *headers]})


async def _more(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
