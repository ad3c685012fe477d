"""The server: all of its parts together."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from support import random_model, weights
from support.loops import LOOPS
from support.messages import Settings
from support.tokenizer import Tokenizer
from support.worker import BLOCK_TOKENS

import hixl_async as hx

from .admission import Admission
from .api import Api
from .metrics import Metrics
from .parameters import Reader
from .processes import Processes
from .router import Router

MODEL, RANDOM = "SmolLM2-135M-Instruct", "random"
LEAVE = 3  # seconds that clients have to take the end of their answers when the server is stopped


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    host: str
    port: int
    blocks: int
    queue: float
    retries: int
    driver: str
    random_model: bool


async def serve(options: Options) -> None:
    """Serve until SIGINT or SIGTERM."""
    # First, because another program may listen there.
    listener = socket.create_server((options.host, options.port))
    checkpoint = random_model.load() if options.random_model else weights.load(progress=_progress)
    config, metrics = checkpoint.config, Metrics()
    reader = Reader(
        RANDOM if options.random_model else MODEL,
        Tokenizer(checkpoint.vocabulary),
        config.vocabulary_size,
        min(config.context_length, options.blocks * BLOCK_TOKENS),
    )
    async with AsyncExitStack() as held:
        held.enter_context(listener)
        engine = await held.enter_async_context(hx.Engine("127.0.0.1:0", name="router", drivers=[options.driver]))
        settings = Settings(engine.address, options.driver, next(iter(LOOPS)), options.blocks, options.random_model)
        processes = await held.enter_async_context(Processes(engine, settings, _tell))
        admission = Admission(int(options.blocks * options.queue), metrics)
        router = Router(engine, processes, config, admission, metrics, retries=options.retries)
        tasks = await held.enter_async_context(asyncio.TaskGroup())
        listening = tasks.create_task(router.listen())
        held.callback(listening.cancel)
        application = Api(router, processes, reader, metrics, config.layers).application()
        host, port = listener.getsockname()[:2]
        print(f"{reader.model} at http://{host}:{port}/v1, and a page at http://{host}:{port}/", flush=True)
        await _run(application, listener, router)


async def _run(application: Any, listener: socket.socket, router: Router) -> None:
    config = uvicorn.Config(application, lifespan="off", log_level="warning", timeout_graceful_shutdown=LEAVE)
    server, loop = uvicorn.Server(config), asyncio.get_running_loop()

    def stop(number: int, frame: FrameType | None) -> None:
        uvicorn.Server.handle_exit(server, number, frame)
        loop.call_soon_threadsafe(router.stop)

    server.handle_exit = stop
    # Uvicorn raises the signals again when it has ended, after which all else ends in order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    await server.serve(sockets=[listener])


def _progress(done: float, what: str) -> None:
    _tell(f"loading the model ({done:.0%}: {what})")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
