"""The HTTP API: OpenAI's, and what shows how the server is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .answer import Answer
from .errors import ApiError, failed
from .metrics import CONTENT_TYPE, Metrics
from .parameters import Reader
from .processes import Processes
from .router import Router
from .status import status

MOST = 1 << 20  # bytes of a request
PAGE = Path(__file__).with_name("page.html")


class Api:
    """The endpoints.

    :param layers: the number of the model's layers.
    """

    def __init__(self, router: Router, processes: Processes, reader: Reader, metrics: Metrics, layers: int) -> None:
        self._router = router
        self._processes = processes
        self._reader = reader
        self._metrics = metrics
        self._layers = layers
        self._started = int(time.time())
        self._page = PAGE.read_text(encoding="utf-8")

    def application(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics_text),
                Route("/reset_prefix_cache", self._reset, methods=["POST"]),
                Route("/status", self._status),
                Route("/", self._index),
            ],
            exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected},
        )

    async def _completions(self, request: Request) -> Answer:
        return await self._answer(request, chat=False)

    async def _chat(self, request: Request) -> Answer:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Answer:
        parameters = self._reader.read(await _body(request), chat=chat)
        return Answer(parameters, self._router, self._reader.tokenizer, self._reader.model)

    async def _models(self, _request: Request) -> Response:
        model = {"id": self._reader.model, "object": "model", "created": self._started, "owned_by": "hixl_async"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, _request: Request) -> Response:
        ready = self._processes.ready
        body = {"status": "ready" if ready else "starting", "processes": self._processes.pids()}
        return JSONResponse(body, 200 if ready else 503)

    async def _metrics_text(self, _request: Request) -> Response:
        states = [generation.state for generation in self._router.current.values()]
        return Response(self._metrics.text(self._processes, states), media_type=CONTENT_TYPE)

    async def _reset(self, _request: Request) -> Response:
        await self._router.clear()
        return JSONResponse({})

    async def _status(self, _request: Request) -> Response:
        return JSONResponse(status(self._router, self._processes, self._layers))

    async def _index(self, _request: Request) -> Response:
        return HTMLResponse(self._page)


async def _body(request: Request) -> Any:
    """Return the JSON of a request.

    :raises ApiError: if it is too long, or malformed.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST:
            raise ApiError(f"the body is longer than {MOST} bytes", status=413, code="too_large")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("the body is not JSON", code="invalid_json") from None


def _json(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error)


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json(ApiError(error.detail, status=error.status_code, code=error.detail.lower().replace(" ", "_")))


async def _unexpected(_request: Request, error: Exception) -> Response:
    return _json(failed(type(error).__name__))
