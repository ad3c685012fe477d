"""The server as its clients see it: real processes with a tiny random model, and the `openai` client.

All tests share one server.  Its answers are compared with those that one process computes alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

for package in ("numpy", "starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(package, reason=f"the server's tests need {package}")

import httpx  # noqa: E402 - after importorskip, as those below
import numpy as np  # noqa: E402
import openai  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402
from scheduler.model import BatchedLlama  # noqa: E402
from scheduler.records import Part  # noqa: E402
from server.admission import Admission  # noqa: E402
from server.errors import ApiError  # noqa: E402
from server.messages import Note  # noqa: E402
from server.metrics import Metrics  # noqa: E402
from server.processes import Pair  # noqa: E402
from server.router import Router  # noqa: E402
from server.text import Text  # noqa: E402
from support import random_model  # noqa: E402
from support.model import Llama  # noqa: E402
from support.tokenizer import TextStream, Tokenizer, chat_prompt  # noqa: E402

import hixl_async as hx  # noqa: E402

ROOT = Path(hx.__file__).parents[1]
MAIN = ROOT / "examples" / "server" / "main.py"
BLOCKS = 64  # of 16 tokens, in each pool
CHECKPOINT = random_model.load()
END = CHECKPOINT.config.end_token
TOKENIZER = Tokenizer(CHECKPOINT.vocabulary)
IDS = {"return_token_ids": True}


# ----------------------------------------------------------------------- the server


class Server:
    """A running server."""

    def __init__(self, folder: Path) -> None:
        self.output, self.errors = folder / "stdout.txt", folder / "stderr.txt"
        with self.output.open("w") as stdout, self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, MAIN, "--random-model", "--port", "0", "--blocks", str(BLOCKS), "--retries", "1"],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=stdout,
                stderr=stderr,
            )
        until(lambda: "\n" in self.output.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors.read_text()
        self.url = self.output.read_text().split()[2].removesuffix("/v1,")

    def ask(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        # Without the certificates, which would take most of the time.
        return httpx.request(method, self.url + path, verify=False, **options)

    @property
    def pids(self) -> dict[str, int]:
        return self.ask("/health").json()["processes"]

    def metrics(self) -> dict[str, float]:
        lines = self.ask("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def blocks(self, state: str) -> list[float]:
        """Return the number of blocks in a state, in both pools."""
        metrics = self.metrics()
        return [metrics.get(f'server_blocks{{process="{name}",state="{state}"}}', -1) for name in ("P", "D")]

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)

    def run(self, work: Callable[[AsyncOpenAI], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine function with a client that never asks again."""

        async def main() -> Any:
            http = httpx.AsyncClient(verify=False, timeout=50)
            async with AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http
            ) as client:
                return await work(client)

        return asyncio.run(main())


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server, which leaves nothing behind."""
    names = sorted(os.listdir("/dev/shm"))
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        until(lambda: -1 not in server.blocks("free"))
        pids = list(server.pids.values())
        yield server
        pids += server.pids.values()
        server.process.terminate()
        assert server.process.wait(20) == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert sorted(os.listdir("/dev/shm")) == names
    with socket.create_server(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))):
        pass
    # The router hears of a death from the kernel or by a connection, whichever comes first.
    told = re.compile(r"[PD]: (was killed by SIGKILL|.*peer '[PD]'.*); it is started again")
    assert not [line for line in server.errors.read_text().splitlines() if not told.fullmatch(line)]


# ----------------------------------------------------------------------- requests and answers


class Asked(NamedTuple):
    """A request."""

    prompt: list[int]
    max_tokens: int


class Answered(NamedTuple):
    """An answer, as it was streamed."""

    tokens: list[int]
    text: str
    reason: str
    usage: dict[str, int]


def requests(count: int, seed: int, *, answer: int = 24) -> list[Asked]:
    """Return random requests; half of them begin alike."""
    dice = random.Random(seed)
    beginning = [dice.randrange(256) for _ in range(40)]
    return [
        Asked(
            beginning * dice.randrange(2) + [dice.randrange(256) for _ in range(dice.randint(1, 60))],
            dice.randint(1, answer),
        )
        for _ in range(count)
    ]


LLAMA = Llama(CHECKPOINT.config, CHECKPOINT.weights)


def assert_alone(asked: Asked, answered: Answered) -> None:
    """Assert that an answer is what one process gives, which computes all of it at once."""
    tokens = asked.prompt + answered.tokens[:-1]
    blocks = -(-len(tokens) // 16)
    memory = np.zeros(CHECKPOINT.config.kv_shape(blocks, 16), np.float32)
    part = Part(0, tokens, 0, range(blocks))
    (logits,) = BatchedLlama(LLAMA, memory).logits([part], [len(asked.prompt) - 1])
    assert answered.tokens == logits.argmax(axis=1).tolist()
    ended = answered.tokens[-1] == END
    assert END not in answered.tokens[:-1]
    assert answered.reason == ("stop" if ended else "length")
    assert ended or len(answered.tokens) == asked.max_tokens
    stream = TextStream(TOKENIZER)
    shown = [stream.feed(token) for token in answered.tokens if not TOKENIZER.is_special(token)]
    assert answered.text == "".join(shown) + stream.finish()
    prompt, answer = len(asked.prompt), len(answered.tokens)
    assert answered.usage == {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


async def open_stream(client: AsyncOpenAI, asked: Asked) -> openai.AsyncStream[Any]:
    return await client.completions.create(
        model="random",
        prompt=asked.prompt,
        max_tokens=asked.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IDS,
    )


async def answer(client: AsyncOpenAI, asked: Asked, heard: Callable[[], None] = lambda: None) -> Answered:
    """Have a request answered in a stream.

    :param heard: called for each chunk.
    """
    tokens, text, reason, usage = [], "", "", {}
    async for chunk in await open_stream(client, asked):
        heard()
        for choice in chunk.choices:
            tokens += choice.token_ids
            text += choice.text
            reason = choice.finish_reason or reason
        usage = chunk.usage.model_dump(exclude_none=True) if chunk.usage else usage
    return Answered(tokens, text, reason, usage)


def assert_all_given_back(server: Server) -> None:
    """Assert that no request holds a block of either pool."""
    until(lambda: server.blocks("used") == server.blocks("quarantined") == [0, 0])
    assert server.ask("/reset_prefix_cache", "POST").status_code == 200
    until(lambda: server.blocks("free") == [BLOCKS, BLOCKS])


# ----------------------------------------------------------------------- the tests


def test_streams_at_the_same_time_are_those_of_one_process(server: Server) -> None:
    asked = requests(32, seed=1)
    before = server.metrics()

    async def all_of_them(client: AsyncOpenAI) -> list[Answered]:
        return await asyncio.gather(*(answer(client, each) for each in asked))

    answered = server.run(all_of_them)
    for one, other in zip(asked, answered, strict=True):
        assert_alone(one, other)
    after = server.metrics()
    tokens = sum(len(each.tokens) for each in answered)
    for name, count in {
        'requests_total{outcome="finished"}': 32,
        'tokens_total{kind="prompt"}': sum(len(each.prompt) for each in asked),
        'tokens_total{kind="generated"}': tokens,
    }.items():
        assert after[f"server_{name}"] - before.get(f"server_{name}", 0) == count
    # A token may be heard of only by the end of its request.
    first, gaps = (after[f"server_{name}_seconds_count"] for name in ("time_to_first_token", "token_gap"))
    assert 0 < first <= 32
    assert 0 < gaps <= tokens - 32
    assert after['server_current_requests{state="running"}'] == 0
    assert_all_given_back(server)


def test_a_chat_is_the_prompt_of_its_messages(server: Server) -> None:
    question = "What is a hatch?"
    asked = Asked(TOKENIZER.encode(chat_prompt(question)), 6)
    messages: list[Any] = [{"role": "user", "content": question}]

    async def ask(client: AsyncOpenAI) -> tuple[Any, Any, str, set[str]]:
        models = [model.id async for model in client.models.list()]
        create = client.chat.completions.create
        whole = await create(model="random", messages=messages, max_completion_tokens=6, extra_body=IDS)
        stream = await create(model="random", messages=messages, max_tokens=6, stream=True)
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content for chunk in chunks)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        return models, whole, text, {chunk.id for chunk in chunks}

    models, whole, text, ids = server.run(ask)
    assert models == ["random"]
    (choice,) = whole.choices
    usage = whole.usage.model_dump(exclude_none=True)
    assert_alone(asked, Answered(choice.token_ids, choice.message.content, choice.finish_reason, usage))
    assert text == choice.message.content
    assert len(ids) == 1


def test_a_stop_string_ends_an_answer_and_its_request(server: Server) -> None:
    prompt = [72, 105]

    async def ask(client: AsyncOpenAI, **stop: Any) -> Any:
        create = client.completions.create
        return (await create(model="random", prompt=prompt, max_tokens=100, **stop)).choices[0]

    text = server.run(ask).text
    stop = text[20:22]
    choice = server.run(lambda client: ask(client, stop=[stop, "never"]))
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert_all_given_back(server)


def test_clients_that_leave_hold_nothing(server: Server) -> None:
    asked, dice = requests(20, seed=2), random.Random(3)
    leavers = {number: dice.choice([None, 0, 1, 5]) for number in dice.sample(range(20), 6)}
    asked = [Asked(each.prompt, 400) if number in leavers else each for number, each in enumerate(asked)]
    before = server.metrics()

    async def leave(client: AsyncOpenAI, each: Asked, chunks: int | None) -> None:
        opening = asyncio.create_task(open_stream(client, each))
        if chunks is None:  # before it has heard anything
            await asyncio.wait({opening}, timeout=dice.uniform(0, 0.02))
            opening.cancel()
            await asyncio.wait({opening})
            return
        async with await opening as stream:
            for _ in range(chunks):
                await anext(stream)

    async def all_of_them(client: AsyncOpenAI) -> list[Any]:
        return await asyncio.gather(
            *(
                leave(client, each, leavers[number]) if number in leavers else answer(client, each)
                for number, each in enumerate(asked)
            )
        )

    for number, answered in enumerate(server.run(all_of_them)):
        if number not in leavers:
            assert_alone(asked[number], answered)
    assert_all_given_back(server)
    after = server.metrics()
    finished, cancelled, failed = (
        after[f'server_requests_total{{outcome="{outcome}"}}'] - before[f'server_requests_total{{outcome="{outcome}"}}']
        for outcome in ("finished", "cancelled", "failed")
    )
    assert failed == 0
    assert finished == 14
    silent = sum(chunks is None for chunks in leavers.values())  # some of these may not have come as far
    assert 6 - silent <= cancelled <= 6


def test_a_full_pool_refuses_requests(server: Server) -> None:
    long = Asked([1], 16 * BLOCKS - 1)

    async def fill(client: AsyncOpenAI) -> openai.RateLimitError:
        opened = [asyncio.create_task(open_stream(client, long)) for _ in range(4)]  # as many pools as may wait
        async with await opened[0]:
            with pytest.raises(openai.RateLimitError) as caught:
                while True:
                    await answer(client, Asked([1], 1))
            for task in opened[1:]:
                task.cancel()
            await asyncio.wait(opened[1:])
        return caught.value

    error = server.run(fill)
    assert error.code == "pool_full"
    assert error.type == "rate_limit_error"
    assert int(error.response.headers["retry-after"]) >= 1
    assert_all_given_back(server)
    assert server.run(lambda client: answer(client, Asked([1], 1))).reason == "length"


GOOD = {"model": "random", "prompt": "hi", "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "change", "status", "param", "code"),
    [
        ("completions", {"model": "gpt"}, 404, "model", "model_not_found"),
        ("completions", {"model": None}, 400, "model", None),
        ("completions", {"prompt": ""}, 400, "prompt", None),
        ("completions", {"prompt": ["a", "b"]}, 400, "prompt", None),
        ("completions", {"prompt": [1, 259]}, 400, "prompt", None),
        ("completions", {"prompt": [True]}, 400, "prompt", None),
        ("completions", {"prompt": "\ud800"}, 400, "prompt", None),
        ("completions", {"max_tokens": 0}, 400, "max_tokens", None),
        ("completions", {"max_tokens": "2"}, 400, "max_tokens", None),
        ("completions", {"max_tokens": 16 * BLOCKS}, 400, "max_tokens", "context_length_exceeded"),
        ("completions", {"prompt": [1] * 16 * BLOCKS}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"stream": 1}, 400, "stream", None),
        ("completions", {"stop": [""]}, 400, "stop", None),
        ("completions", {"n": 2}, 400, "n", "unsupported_value"),
        ("completions", {"temperature": 0.7}, 400, "temperature", "unsupported_value"),
        ("chat/completions", {}, 400, "messages", None),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0]", None),
        ("chat/completions", {"messages": [{"role": "user", "content": 1}]}, 400, "messages[0]", None),
        ("completion", {}, 404, None, "not_found"),
    ],
)
def test_bad_requests(
    server: Server, path: str, change: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    response = server.ask(f"/v1/{path}", "POST", content=json.dumps({**GOOD, **change}))
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, None),
        (b"[" * 100_000, 400, "invalid_json"),
        (b" " * 1_100_000, 413, "too_large"),
    ],
    ids=["half", "list", "deep", "long"],
)
def test_bad_bodies(server: Server, content: bytes, status: int, code: str | None) -> None:
    response = server.ask("/v1/completions", "POST", content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_the_page_loads_nothing(server: Server) -> None:
    response = server.ask("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "<title>" in response.text
    assert not re.search(r"https?:|(?:src|href)=|@import", response.text)


@pytest.mark.parametrize(("name", "chunks"), [("D", 40), ("P", 3)])
def test_requests_go_on_when_a_process_dies(server: Server, name: str, chunks: int) -> None:
    asked = requests(8, seed=4, answer=60)
    starts = server.metrics()[f'server_process_starts{{process="{name}"}}']
    heard = iter(range(1_000_000))

    async def all_of_them(client: AsyncOpenAI) -> list[Answered]:
        def hear() -> None:
            if next(heard) == chunks:
                server.kill(name)

        return await asyncio.gather(*(answer(client, each, hear) for each in asked))

    for one, other in zip(asked, server.run(all_of_them), strict=True):
        assert_alone(one, other)
    assert next(heard) > chunks
    assert any(request["tries"] for request in server.ask("/status").json()["requests"][-len(asked) :])
    until(lambda: server.metrics()[f'server_process_starts{{process="{name}"}}'] == starts + 1)
    assert_all_given_back(server)


def test_a_request_whose_process_dies_too_often_fails(server: Server) -> None:
    def request() -> dict[str, Any]:
        return server.ask("/status").json()["requests"][-1]

    async def kill_twice(client: AsyncOpenAI) -> None:
        async with await open_stream(client, Asked([1], 1000)) as stream:
            await anext(stream)
            server.kill("D")
            until(lambda: request()["tries"] == 1)
            before = request()["tokens"]
            until(lambda: request()["tokens"] > before)  # of the next D
            server.kill("D")
            async for _ in stream:
                pass

    with pytest.raises(openai.APIError) as caught:
        server.run(kill_twice)
    assert (caught.value.code, caught.value.type) == ("process_lost", "service_unavailable_error")
    until(lambda: server.ask("/health").status_code == 200)
    assert_all_given_back(server)
    (asked,) = requests(1, seed=6)
    assert_alone(asked, server.run(lambda client: answer(client, asked)))


def test_requests_end_when_the_server_is_stopped(tmp_path: Path) -> None:
    server = Server(tmp_path)

    async def stop(client: AsyncOpenAI) -> None:
        async with await open_stream(client, Asked([1], 16 * BLOCKS - 1)) as stream:
            await anext(stream)
            server.process.send_signal(signal.SIGINT)
            async for _ in stream:
                pass

    try:
        with pytest.raises(openai.APIError) as caught:
            server.run(stop)
        assert server.process.wait(20) == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert caught.value.code == "server_stopping"
    assert server.errors.read_text() == ""


# ----------------------------------------------------------------------- the router, with a fake D


class FakeDecode:
    """A D that hears of requests, and answers as a test says."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers = iter(answers)
        self.heard: Callable[[], None] = lambda: None

    async def ask(self, name: str, service: str, body: dict[str, Any]) -> dict[str, Any]:
        assert (name, service) == ("D", "generate")
        self.asked.append(body)
        self.heard()
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pair(self) -> Any:
        return Pair(None, self)  # type: ignore[arg-type]

    def doubt(self, _pair: Pair) -> None:
        pass

    def router(self) -> Router:
        metrics = Metrics()
        admission = Admission(BLOCKS, metrics)
        return Router(None, self, CHECKPOINT.config, admission, metrics, retries=1)  # type: ignore[arg-type]


async def followed(router: Router) -> list[int]:
    async with router.generation([1, 2], 4) as generation:
        return [token async for token in generation.follow()]


async def test_tokens_whose_notifications_were_dropped_come_with_the_answer() -> None:
    decode = FakeDecode({"tokens": [5, 6, 7, 8]})
    router = decode.router()

    def hear() -> None:
        (generation,) = router.current.values()
        assert [generation.hear(Note(1, 2 + place, 5 + place)) for place in (0, 2, 3)] == [True, False, False]

    decode.heard = hear
    assert await followed(router) == [5, 6, 7, 8]
    assert not router.current


async def test_a_request_goes_on_after_the_tokens_that_are_here() -> None:
    decode = FakeDecode(hx.RequestLostError("D was killed"), {"tokens": [6, 7, 8]})
    router = decode.router()

    def hear() -> None:
        (generation,) = router.current.values()
        generation.hear(Note(1, 2, 5))

    decode.heard = hear
    assert await followed(router) == [5, 6, 7, 8]
    assert [(body["prompt"], body["max_tokens"]) for body in decode.asked] == [([1, 2], 4), ([1, 2, 5], 3)]


@pytest.mark.parametrize(
    ("errors", "status", "code"),
    [
        ([hx.RequestLostError("D was killed")] * 2, 503, "process_lost"),
        ([hx.RemoteError("P ran out of luck")], 500, "internal_error"),
        ([hx.RangeError("too long")], 500, "internal_error"),
    ],
)
async def test_errors_have_a_type(errors: list[Exception], status: int, code: str) -> None:
    router = FakeDecode(*errors).router()
    with pytest.raises(ApiError) as caught:
        await followed(router)
    assert (caught.value.status, caught.value.body["error"]["code"]) == (status, code)
    assert [generation.outcome for generation in router.ended] == ["failed"]


# ----------------------------------------------------------------------- the text of an answer


@pytest.mark.parametrize(
    ("stops", "shown", "stopped"),
    [
        ([], "abcabd", False),
        (["abd"], "abc", True),
        (["bd", "ca"], "ab", True),
        (["dx", "abdx"], "abcabd", False),
        (["a"], "", True),
    ],
)
def test_a_text_ends_before_a_stop_string(stops: list[str], shown: str, stopped: bool) -> None:
    text = Text(TOKENIZER, stops)
    pieces = []
    for token in TOKENIZER.encode("abcabd"):
        pieces.append(text.feed(token))
        if text.stopped:
            break
    assert "".join(pieces) + ("" if text.stopped else text.finish()) == shown
    assert text.stopped == stopped


def test_a_text_is_shown_as_soon_as_no_stop_string_can_begin_in_it() -> None:
    text = Text(TOKENIZER, ["aab", "never"])
    assert [text.feed(token) for token in TOKENIZER.encode("xaaaab")] == ["x", "", "", "a", "a", ""]
    assert text.stopped
