"""The scheduler: its policy with a fake model, the model's rows, the router, and runs of all of it in processes.

The fake model's samples depend on the keys and values that it reads, so that an answer is right only if all of them arrived.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="the scheduler needs numpy")

from scheduler import policy, router  # noqa: E402 - after importorskip, as those below
from scheduler.cache import Cache  # noqa: E402
from scheduler.compute import Compute  # noqa: E402
from scheduler.loss import cause, is_loss  # noqa: E402
from scheduler.model import BatchedLlama  # noqa: E402
from scheduler.policy import Decode, Prefill  # noqa: E402
from scheduler.process import Process  # noqa: E402
from scheduler.records import OnLayer, Part, Request, Sample  # noqa: E402
from scheduler.replay import differences  # noqa: E402
from scheduler.router import Planned, Router  # noqa: E402
from scheduler.timeline import Span, draw, overlaps  # noqa: E402
from support import fleet, random_model  # noqa: E402
from support.fleet import Failed, Silent  # noqa: E402
from support.messages import Settings  # noqa: E402
from support.model import Llama, PagedCache  # noqa: E402
from support.worker import kv_digests  # noqa: E402

import hixl_async as hx  # noqa: E402
from hixl_async.testing import until  # noqa: E402
from tests.hixlsim.build import build  # noqa: E402

LAYERS, SIZE, TOKENS = 3, 4, 97
GROUP = hx.kv.Group.attention(LAYERS, kv_heads=1, head_dim=2, dtype="float32")


# ----------------------------------------------------------------------- the policy, with a fake model


class FakeModel:
    """A model whose keys and values are functions of the tokens, and whose samples are functions of those."""

    def __init__(self, pool: hx.kv.Pool) -> None:
        self.keys, self.values = ([pool.array(layer, part) for layer in range(LAYERS)] for part in ("k", "v"))
        self.steps: list[list[tuple[int, int, int]]] = []  # for each part: number, first position, tokens
        self.before_layer: Callable[[Sequence[Part], int], None] = lambda parts, layer: None

    def step(self, parts: Sequence[Part], on_layer: OnLayer | None) -> list[Sample]:
        assert threading.current_thread() is not threading.main_thread()  # that is the event loop's
        self.steps.append([(part.number, part.start, len(part.tokens)) for part in parts])
        for layer in range(LAYERS):
            self.before_layer(parts, layer)
            for part in parts:
                for position, token in enumerate(part.tokens, part.start):
                    place = part.table[position // SIZE], position % SIZE
                    self.keys[layer][place] = token * (layer + 1)
                    self.values[layer][place] = token + layer
            if on_layer:
                on_layer(layer)
        return [self._sample(part) for part in parts]

    def _sample(self, part: Part) -> Sample:
        total = 0
        for position in range(part.start + len(part.tokens)):
            place = part.table[position // SIZE], position % SIZE
            for layer in range(LAYERS):
                total += (position + 1) * int(self.keys[layer][place].sum()) + int(self.values[layer][place].sum())
        return Sample(total % TOKENS, str(total))


def expected(prompt: list[int], count: int) -> list[Sample]:
    """Return the answer of the fake model."""
    tokens, answer = list(prompt), []
    for _ in range(count):
        weights = sum(layer + 1 for layer in range(LAYERS))
        total = sum(2 * (at + 1) * token * weights for at, token in enumerate(tokens))
        total += sum(2 * (token + layer) for token in tokens for layer in range(LAYERS))
        answer.append(Sample(total % TOKENS, str(total)))
        tokens.append(answer[-1].token)
    return answer


class Sides:
    """P and D in one process, with fake models."""

    def __init__(self, source: hx.kv.Pool, target: hx.kv.Pool, to_d: hx.Peer, held: AsyncExitStack) -> None:
        self.p_model, self.d_model = FakeModel(source), FakeModel(target)
        self.p = Prefill(Cache(source), held.enter_context(Compute(self.p_model.step)))
        self.events: list[tuple[str, int]] = []
        self.asked: list[tuple[int, int, int]] = []  # number, tokens, the first position that is missing
        self.finished: list[int] = []
        self.to_d = to_d
        self.d = Decode(Cache(target), held.enter_context(Compute(self.d_model.step)), self.ask, self.tell)

    async def ask(self, number: int, tokens: list[int], first: int, ticket: dict[str, Any]) -> None:
        self.asked.append((number, len(tokens), first))
        await self.p.prefill(number, tokens, first, self.to_d, ticket)

    def tell(self, event: str, request: Request) -> None:
        self.events.append((event, request.number))

    async def generate(self, request: Request) -> Request:
        """Answer a request as D does."""

        async def finished(blocks: hx.kv.Blocks) -> None:
            assert blocks.tokens >= len(request.tokens) - 1
            self.finished.append(request.number)

        await self.d.generate(request, finished)
        return request

    async def answered(self, *requests: Request) -> None:
        """Answer requests at the same time, and compare the answers."""
        await asyncio.gather(*map(self.generate, requests))
        for request in requests:
            assert request.answer == expected(request.prompt, request.max_tokens)

    async def happens(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        while not condition():
            await asyncio.sleep(0.001)


async def all_free(cache: Cache) -> None:
    """Drop what is kept, and check that nothing else is missing."""
    while cache.drop():
        pass
    async with cache.pool.reserve(blocks=cache.pool.blocks):
        assert cache.pool.statistics().quarantined == 0
    assert cache.pool.statistics() == (cache.pool.blocks, 0, 0, 0)


@pytest.fixture
def blocks() -> int:
    """The size of D's pool."""
    return 64


@pytest.fixture
async def sides(blocks: int) -> AsyncIterator[Sides]:
    async with AsyncExitStack() as held:
        decode = await held.enter_async_context(hx.Engine("127.0.0.1:0", name="D"))
        prefill = await held.enter_async_context(hx.Engine(name="P"))
        view = hx.kv.View.ordered(GROUP, blocks=64, block_tokens=SIZE)
        source = await held.enter_async_context(hx.kv.Pool(prefill, view, access="none", shuffle=1))
        view = hx.kv.View.ordered(GROUP, blocks=blocks, block_tokens=SIZE)
        target = await held.enter_async_context(hx.kv.Pool(decode, view, shuffle=2))
        sides = Sides(source, target, await prefill.connect(decode.address), held)
        steps = asyncio.create_task(sides.d.run())
        yield sides
        steps.cancel()
        assert not sides.d.batch
        await all_free(sides.p.cache)
        await all_free(sides.d.cache)
        sides.p_model, sides.d_model = (None, None)  # type: ignore[assignment]  # their arrays keep the memory mapped
        del sides.p, sides.d


def prompt_of(seed: int, tokens: int) -> list[int]:
    return [(seed * 31 + place * 7) % TOKENS for place in range(tokens)]


async def test_answers_are_those_of_the_model_alone(sides: Sides) -> None:
    requests = [Request(number, prompt_of(number, 1 + 5 * number), 1 + number % 5) for number in range(10)]
    await sides.answered(*requests)
    assert sorted(sides.finished) == list(range(10))


async def test_a_stop_token_ends_an_answer(sides: Sides) -> None:
    first, second, third = expected(prompt_of(3, 9), 3)
    request = Request(0, prompt_of(3, 9), 10, stop=second.token)
    assert second.token not in (first.token, third.token)
    await sides.generate(request)
    assert request.answer == [first, second]


async def test_sequences_are_continued_together(sides: Sides) -> None:
    gate = threading.Event()
    sides.d_model.before_layer = lambda parts, layer: None if gate.wait(30) else pytest.fail("no one opened the gate")
    answers = asyncio.gather(*(sides.generate(Request(number, prompt_of(number, 6), 4)) for number in range(5)))
    await sides.happens(lambda: len(sides.d.batch) == 5)
    gate.set()
    await answers
    assert max(len(step) for step in sides.d_model.steps) == 5
    assert len(sides.d_model.steps) < 5 * 3  # fewer than tokens


async def test_a_step_has_so_many_sequences_at_most(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "BATCH", 2)
    gate = threading.Event()
    sides.d_model.before_layer = lambda parts, layer: None if gate.wait(30) else pytest.fail("no one opened the gate")
    answers = asyncio.create_task(sides.answered(*(Request(number, prompt_of(number, 6), 4) for number in range(5))))
    await sides.happens(lambda: len(sides.d.batch) == 5)
    gate.set()
    await answers
    assert max(len(step) for step in sides.d_model.steps) == 2


async def test_chunks_of_a_long_prompt_alternate_with_other_prompts(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "CHUNK", 8)
    arrived = threading.Event()
    sides.p_model.before_layer = lambda parts, layer: None if arrived.wait(30) else pytest.fail("no second prompt")
    long, short = Request(0, prompt_of(0, 37), 2), Request(1, prompt_of(1, 6), 2)
    answers = asyncio.create_task(sides.answered(long, short))
    await sides.happens(lambda: len(sides.asked) == 2 and sides.p.cache.pool.statistics().free < 64 - 10)
    arrived.set()
    await answers
    starts = [(number, start) for step in sides.p_model.steps for number, start, _ in step]
    assert [start for number, start in starts if number == 0] == [0, 8, 16, 24, 32]
    assert starts[0] == (0, 0)
    assert starts.index((1, 0)) < starts.index((0, 16))
    assert len(sides.asked) == 2  # a stream for each prompt, however many chunks


async def test_decoding_goes_on_while_layers_of_another_prompt_arrive(sides: Sides) -> None:
    gate, reached = threading.Event(), threading.Event()

    def before_layer(parts: Sequence[Part], layer: int) -> None:
        if parts[0].number == 1 and layer == LAYERS - 1:
            reached.set()
            assert gate.wait(30)

    sides.p_model.before_layer = before_layer
    early = asyncio.create_task(sides.generate(Request(0, prompt_of(0, 7), 12)))
    await sides.happens(lambda: ("token", 0) in sides.events)
    late = asyncio.create_task(sides.generate(Request(1, prompt_of(1, 20), 3)))
    await early
    await sides.happens(lambda: sides.events.count(("layer", 1)) == LAYERS - 1)
    assert reached.is_set()
    assert ("token", 1) not in sides.events
    gate.set()
    assert (await late).answer == expected(prompt_of(1, 20), 3)


async def test_only_what_is_missing_is_computed_and_sent(sides: Sides) -> None:
    beginning = prompt_of(0, 3 * SIZE)
    await sides.answered(Request(0, [*beginning, 1, 2], 1))
    await sides.answered(Request(1, [*beginning, 3, 4, 5], 2))
    assert sides.asked == [(0, 14, 0), (1, 15, 12)]
    assert sides.p_model.steps == [[(0, 0, 14)], [(1, 12, 3)]]
    assert (sides.p.cache.reused, sides.d.cache.reused) == (12, 12)


async def test_a_prompt_that_is_there_is_computed_from_its_last_block_on(sides: Sides) -> None:
    prompt = prompt_of(0, 3 * SIZE)
    await sides.answered(Request(0, prompt, 1))
    await sides.answered(Request(1, prompt, 3))
    assert sides.p_model.steps == [[(0, 0, 12)], [(1, 8, 4)]]


async def test_p_sends_a_beginning_that_only_it_has(sides: Sides) -> None:
    beginning = prompt_of(0, 3 * SIZE)
    await sides.answered(Request(0, [*beginning, 1, 2], 1))
    while sides.d.cache.drop():
        pass
    await sides.answered(Request(1, [*beginning, 3, 4, 5], 2))
    assert sides.asked[1] == (1, 15, 0)
    assert sides.p_model.steps[1] == [(1, 12, 3)]


async def test_p_computes_a_beginning_that_only_d_has(sides: Sides) -> None:
    beginning = prompt_of(0, 3 * SIZE)
    await sides.answered(Request(0, [*beginning, 1, 2], 1))
    while sides.p.cache.drop():
        pass
    await sides.answered(Request(1, [*beginning, 3, 4, 5], 2))
    assert sides.asked[1] == (1, 15, 12)
    assert sides.p_model.steps[1] == [(1, 0, 15)]


@pytest.mark.parametrize("blocks", [9])
async def test_the_youngest_gives_way_when_the_pool_is_full(sides: Sides) -> None:
    # 2 prompts of 3 blocks, with answers of 3 more: 12 blocks.
    requests = [Request(number, prompt_of(number, 3 * SIZE), 3 * SIZE) for number in range(2)]
    await sides.answered(*requests)
    preempted = [number for event, number in sides.events if event == "preempted"]
    assert preempted
    assert set(preempted) == {1}
    again = [tokens for number, tokens, _ in sides.asked if number == 1]
    assert len(again) == 1 + len(preempted)
    assert again[-1] > 3 * SIZE  # with the answer so far


async def test_a_request_that_could_never_end_is_refused(sides: Sides) -> None:
    with pytest.raises(hx.RangeError, match="250 \\+ 7 tokens, and the pool holds 256"):
        await sides.generate(Request(0, prompt_of(0, 250), 7))
    await sides.answered(Request(1, prompt_of(0, 50), 7))


@pytest.mark.parametrize("blocks", [7])
async def test_what_is_kept_gives_way_to_prompts(sides: Sides) -> None:
    for number in range(4):
        await sides.answered(Request(number, prompt_of(number, 5 * SIZE), 2))
    assert ("preempted", 0) not in sides.events


@pytest.mark.parametrize("blocks", [8])
async def test_prompts_wait_for_blocks(sides: Sides) -> None:
    await sides.answered(*(Request(number, prompt_of(number, 5 * SIZE - 3), 3) for number in range(8)))


async def test_a_request_that_waits_is_cancelled(sides: Sides) -> None:
    gate = threading.Event()
    sides.p_model.before_layer = lambda parts, layer: None if gate.wait(30) else pytest.fail("no one opened the gate")
    requests = [Request(number, prompt_of(number, 9), 2) for number in range(policy.STREAMS + 2)]
    tasks = [asyncio.create_task(sides.generate(request)) for request in requests]
    await sides.happens(lambda: len(sides.asked) == policy.STREAMS)
    tasks[-2].cancel()
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[-2].cancelled()
    assert len(sides.finished) == len(requests) - 1


async def test_a_request_whose_layers_arrive_is_cancelled(sides: Sides) -> None:
    gate = threading.Event()

    def before_layer(parts: Sequence[Part], layer: int) -> None:
        if parts[0].number == 0 and layer == 1:
            assert gate.wait(30)

    sides.p_model.before_layer = before_layer
    task = asyncio.create_task(sides.generate(Request(0, prompt_of(0, 9), 2)))
    other = asyncio.create_task(sides.answered(Request(1, prompt_of(1, 9), 2)))
    await sides.happens(lambda: ("layer", 0) in sides.events)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert sides.p.cache.pool.statistics().free < 64  # P's thread still writes there
    gate.set()
    await other
    assert 0 not in sides.finished


async def test_a_request_in_a_step_is_cancelled(sides: Sides) -> None:
    gate, reached = threading.Event(), threading.Event()

    def before_layer(parts: Sequence[Part], layer: int) -> None:
        reached.set()
        assert gate.wait(30)

    sides.d_model.before_layer = before_layer
    other = asyncio.create_task(sides.answered(Request(1, prompt_of(1, 9), 4)))
    request = Request(0, prompt_of(0, 3), 4)
    task = asyncio.create_task(sides.generate(request))
    await sides.happens(lambda: len(sides.d.batch) == 2 and reached.is_set())
    task.cancel()
    await asyncio.wait({task})
    assert request not in sides.d.batch
    gate.set()
    await other
    assert sides.finished == [1]
    assert request.answer == expected(request.prompt, 1)


async def test_the_blocks_of_a_step_are_not_lent_again_before_it_is_over(sides: Sides) -> None:
    gate, reached = threading.Event(), threading.Event()

    def before_layer(parts: Sequence[Part], layer: int) -> None:
        reached.set()
        assert gate.wait(30)

    sides.d_model.before_layer = before_layer
    task = asyncio.create_task(sides.generate(Request(0, prompt_of(0, 2), 9)))  # less than a block, so none is kept
    await sides.happens(reached.is_set)
    task.cancel()
    await asyncio.wait({task})
    assert not sides.d.batch
    assert sides.d.cache.pool.statistics().reserved == 1
    gate.set()
    await sides.happens(lambda: sides.d.cache.pool.statistics().reserved == 0)


async def test_an_error_of_p_reaches_the_request(sides: Sides) -> None:
    def before_layer(parts: Sequence[Part], layer: int) -> None:
        if parts[0].number == 0 and layer == 1:
            raise ArithmeticError("an accelerator is on fire")

    sides.p_model.before_layer = before_layer
    with pytest.raises(ExceptionGroup) as caught:
        await sides.generate(Request(0, prompt_of(0, 9), 2))
    assert caught.group_contains(Exception, match="an accelerator is on fire")
    await sides.answered(Request(1, prompt_of(0, 9), 2))


async def test_a_loss_in_the_middle_of_a_prompt(sides: Sides) -> None:
    lost = threading.Event()

    def before_layer(parts: Sequence[Part], layer: int) -> None:
        if layer == 2:
            assert lost.wait(30)

    async def ask(number: int, tokens: list[int], first: int, ticket: dict[str, Any]) -> None:
        try:
            await sides.ask(number, tokens, first, ticket)
        except hx.HixlError as error:
            raise hx.RequestLostError("P has gone") from error

    sides.d.ask = ask
    sides.p_model.before_layer = before_layer
    requests = [Request(number, prompt_of(number, 30), 2) for number in range(policy.STREAMS + 1)]
    tasks = [asyncio.create_task(sides.generate(request)) for request in requests]
    await sides.happens(lambda: ("layer", 0) in sides.events and len(sides.asked) == policy.STREAMS)
    await sides.to_d.aclose()
    for task in tasks:
        with pytest.raises(ExceptionGroup) as caught:
            await task
        assert is_loss(cause(caught.value))
        lost.set()  # the first request did not wait for P's thread
    assert not sides.finished


async def test_random_requests_in_a_small_pool(sides: Sides) -> None:
    dice = np.random.default_rng(5)
    beginnings = [prompt_of(seed, 3 * SIZE) for seed in range(2)]
    tasks = {}
    for number in range(40):
        prompt = beginnings[number % 2] * int(dice.integers(2)) + prompt_of(number, int(dice.integers(1, 30)))
        request = Request(number, prompt, int(dice.integers(1, 20)))
        tasks[request] = asyncio.create_task(sides.generate(request))
    for request, task in tasks.items():
        if request.number % 4 == 1:
            await asyncio.sleep(float(dice.uniform(0, 0.003)))
            task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    for request, task in tasks.items():
        if not task.cancelled():
            assert task.result().answer == expected(request.prompt, request.max_tokens)


def test_the_policy_is_short_enough_to_copy() -> None:
    assert len(Path(policy.__file__).read_text().splitlines()) <= 150


# ----------------------------------------------------------------------- the model


@pytest.fixture(scope="module")
def llama() -> Llama:
    checkpoint = random_model.load()
    return Llama(checkpoint.config, checkpoint.weights)


BLOCKS, ROW_TOKENS = 24, 100


def batched(model: Llama) -> BatchedLlama:
    """Return a model over memory that spoils every result that unwritten bytes enter."""
    return BatchedLlama(model, np.full(model.config.kv_shape(BLOCKS, 16), np.nan, np.float32))


def test_logits_are_close_to_the_demos(llama: Llama) -> None:
    tokens = [(7 * place) % 256 for place in range(ROW_TOKENS)]
    (logits,) = batched(llama).logits([Part(0, tokens, 0, range(7))], [ROW_TOKENS - 1])
    cache = PagedCache(np.zeros(llama.config.kv_shape(7, 16), np.float32), range(7))
    np.testing.assert_allclose(logits[0], llama.forward(tokens, cache), atol=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_rows_depend_on_nothing_but_the_tokens_before(llama: Llama, seed: int) -> None:
    """Compute a sequence in one go, and in random chunks beside random others in random blocks: all bits are equal."""
    dice = np.random.default_rng(seed)
    mine, other = (dice.integers(0, 256, ROW_TOKENS).tolist() for _ in range(2))
    alone = batched(llama)
    (all_at_once,) = alone.logits([Part(0, mine, 0, range(7))], [0])
    digests = kv_digests(PagedCache(alone.memory, range(7)), ROW_TOKENS)

    model, tables = batched(llama), dice.permutation(BLOCKS).tolist()
    here, there = tables[:7], tables[7:14]
    done = beside = 0
    while done < ROW_TOKENS:
        count = min(int(dice.choice([1, 1, 2, 15, 16, 17, 40])), ROW_TOKENS - done)
        parts = [Part(0, mine[done : done + count], done, here)]
        if more := min(int(dice.choice([0, 1, 5, 30])), ROW_TOKENS - beside):
            parts.insert(int(dice.integers(2)), Part(1, other[beside : beside + more], beside, there))
        results = model.logits(parts, [0] * len(parts))
        (logits,) = (rows for part, rows in zip(parts, results, strict=True) if part.number == 0)
        np.testing.assert_array_equal(logits, all_at_once[done : done + count], strict=True)
        done, beside = done + count, beside + more
    assert kv_digests(PagedCache(model.memory, here), ROW_TOKENS) == digests


def test_a_replay_finds_what_differs(llama: Llama) -> None:
    model, prompt = batched(llama), [5, 6, 7]
    answer = [list(model.step([Part(0, prompt, 0, [3, 1])])[0])]
    for position in range(3, 20):
        (sample,) = model.step([Part(0, [answer[-1][0]], position, [3, 1])])
        answer.append(list(sample))
    digests = kv_digests(PagedCache(model.memory, [3, 1]), 20)
    assert differences(llama, prompt, answer, digests) == []
    assert differences(llama, prompt, answer, digests[::-1]) == ["keys and values"]
    wrong = [*answer[:-1], [answer[-1][0], "0"]]
    assert differences(llama, prompt, wrong, digests) == ["logits"]
    wrong = [*answer[:-1], [answer[-1][0] + 1, answer[-1][1]]]
    assert differences(llama, prompt, wrong, digests) == ["tokens"]


# ----------------------------------------------------------------------- the timeline


def test_the_timeline_has_a_line_for_each_request() -> None:
    lives = {1: Span("life", 5.0, 10.0, [1]), 0: Span("life", 0.0, 8.0, [0])}
    spans = [Span("decode", 6.0, 8.0, [0, 1]), Span("prefill", 0.0, 2.0, [0])]
    first, second = draw(lives, {"prefill": "#", "decode": "d"}, spans, {0: "|", 1: "x"})
    assert re.fullmatch(r"   0 #{20}\.{39}d{21}\|", first)
    assert re.fullmatch(r"   1  {49}\.{10}d{21}\.{19,20}x", second)


def test_overlaps_are_with_other_requests() -> None:
    steps = [Span("decode", 0, 1, [0]), Span("decode", 2, 3, [0, 1]), Span("decode", 4, 5, [1])]
    assert overlaps(steps, [Span("prefill", 0.5, 4.5, [1])]) == 1
    assert overlaps(steps, [Span("prefill", 0.5, 4.5, [2])]) == 3


# ----------------------------------------------------------------------- losses, and the router


def remote(name: str) -> hx.RemoteError:
    """Return an error as the router gets it from D."""
    error = hx.RemoteError(f"{name}: it failed")
    error.remote_class = name
    return error


class FakeProcess:
    """A process that answers requests in turn, by raising or returning what it was made with."""

    def __init__(self, *answers: Exception | dict[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.addresses = 0

    async def address(self) -> str:
        self.addresses += 1
        return f"address {self.addresses}"

    async def ask(self, service: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((service, body))
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def planned(cancel_after: float | None = None) -> Planned:
    return Planned(7, 0.0, [1, 2, 3], 4, cancel_after)


LOST = [hx.PeerDownError("D"), Silent(15), *map(remote, ("PeerLostError", "RequestLostError", "StreamAbortedError"))]


@pytest.mark.parametrize("loss", LOST, ids=str)
async def test_a_lost_request_is_sent_again(loss: Exception) -> None:
    p, d = FakeProcess(), FakeProcess(loss, {"answer": [1]})
    router = Router(p, d)  # type: ignore[arg-type]
    assert await router.answer(planned()) == {"answer": [1]}
    body = {"number": 7, "prompt": [1, 2, 3], "max_tokens": 4}
    assert d.asked == [("generate", {**body, "prefill": f"address {tried}"}) for tried in (1, 2)]
    assert [span.numbers for span in router.losses] == [[7]]
    assert router.lives.keys() == {7}


@pytest.mark.parametrize("error", [hx.RangeError("x"), remote("RemoteError"), remote("LayoutMismatchError")], ids=str)
async def test_other_errors_are_final(error: Exception) -> None:
    d = FakeProcess(error)
    with pytest.raises(type(error), match=str(error)):
        await Router(FakeProcess(), d).answer(planned())  # type: ignore[arg-type]
    assert len(d.asked) == 1


async def test_a_request_is_not_sent_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "TRIES", 3)
    d = FakeProcess(*(hx.PeerDownError(str(tried)) for tried in range(9)))
    with pytest.raises(hx.PeerDownError, match="2"):
        await Router(FakeProcess(), d).answer(planned())  # type: ignore[arg-type]
    assert len(d.asked) == 3


async def test_a_cancelled_request_is_cancelled_at_d(monkeypatch: pytest.MonkeyPatch) -> None:
    d = FakeProcess()

    async def ask(service: str, body: dict[str, Any]) -> dict[str, Any]:
        if service == "cancel":
            d.answers.append(hx.PeerDownError("it has just died"))
        return await FakeProcess.ask(d, service, body)

    monkeypatch.setattr(d, "ask", ask)
    assert await Router(FakeProcess(), d).answer(planned(cancel_after=0.01)) == {}  # type: ignore[arg-type]
    assert d.asked[-1] == ("cancel", {"number": 7})


def test_the_cause_of_a_group_is_a_loss() -> None:
    loss, other = hx.StreamAbortedError("x"), ValueError("y")
    assert cause(ExceptionGroup("", [other, ExceptionGroup("", [other, loss])])) is loss
    assert cause(ExceptionGroup("", [ExceptionGroup("", [other])])) is other


# ----------------------------------------------------------------------- a process that is started again

#: A process that does nothing, and has no model to load.
IDLE = """
import asyncio, json, os, sys
import hixl_async as hx

async def main():
    async with hx.Engine("127.0.0.1:0", name="D") as engine:
        engine.serve("fail", lambda peer, body: os._exit(3))
        gone = asyncio.Event()
        router = await engine.connect(json.loads(sys.argv[1])["router"])
        router.add_lost_callback(lambda _: gone.set())
        await gone.wait()

asyncio.run(main())
"""


@asynccontextmanager
async def idle_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Process, asyncio.Task[None]]]:
    (folder / "idle.py").write_text(IDLE)
    monkeypatch.setitem(fleet.PROGRAMS, "D", "idle")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(hx.__file__).parents[1])]))
    async with hx.Engine("127.0.0.1:0", name="router") as engine:
        process = Process(engine, Settings(engine.address, "shm", "asyncio", 1, True), "D")
        running = asyncio.create_task(process.run())
        try:
            yield process, running
        finally:
            process.leave()
            await asyncio.wait({running})
            running.exception()


async def test_a_killed_process_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with idle_process(tmp_path, monkeypatch) as (process, running):
        before, address = await process.pid(), await process.address()
        os.kill(before, signal.SIGKILL)
        await until(lambda: process.starts == 2)
        assert await process.pid() != before
        assert await process.address() != address
        assert await process.ask(fleet.PING, {"n": 1}) == {"n": 1}
        process.leave()
        await running


async def test_a_process_that_hangs_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with idle_process(tmp_path, monkeypatch) as (process, _):
        before = await process.pid()
        with monkeypatch.context() as impatient, pytest.raises(Silent):
            impatient.setattr(fleet, "LOOK", 0.02)
            os.kill(before, signal.SIGSTOP)
            await process.ask(fleet.PING, {})
        assert await process.pid() != before


async def test_a_process_that_fails_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with idle_process(tmp_path, monkeypatch) as (process, running):
        with pytest.raises(hx.PeerDownError):
            await process.ask("fail", {})
        with pytest.raises(Failed, match="D: ended with exit code 3"):
            await running
        assert process.starts == 1


# ----------------------------------------------------------------------- all of it


def run_main(*arguments: str, seconds: float = 50) -> subprocess.CompletedProcess[str]:
    main = Path(policy.__file__).with_name("main.py")
    command = [sys.executable, main, "--random-model", *arguments]
    environment = {**os.environ, "ASCEND_HOME_PATH": str(build())}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)


def check(done: subprocess.CompletedProcess[str], blocks: int) -> None:
    """Check that all is identical and free, after P and D were killed."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"^IDENTICAL: \d+ answers", done.stdout, re.MULTILINE)
    assert done.stdout.count(f"PoolStatistics(free={blocks}, reserved=0, quarantined=0, waiting=0)") == 2
    assert re.findall(r"^(\w) was started 2 times\.$", done.stdout, re.MULTILINE) == ["P", "D"]
    assert re.search(r"requests cancelled, [1-9]\d* sent again\.$", done.stdout, re.MULTILINE)


def test_too_few_blocks_are_refused() -> None:
    done = run_main("--blocks", "26")
    assert done.returncode == 2
    assert "27 blocks" in done.stderr


def test_processes() -> None:
    done = run_main("--requests", "20", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"^IDENTICAL: \d+ answers", done.stdout, re.MULTILINE)
    assert done.stdout.count("PoolStatistics(free=56, reserved=0, quarantined=0, waiting=0)") == 2
    # A chunk or a step that was under way when its request was cancelled still ends.
    assert len(re.findall(r"^ +\d+ [ .#+d!]*[|x][ #d]*$", done.stdout, re.MULTILINE)) == 20


@pytest.mark.parametrize("driver", [["--faults"], ["--driver", "hixl"]], ids=" ".join)
def test_processes_that_are_killed(driver: list[str]) -> None:
    done = run_main("--requests", "10", "--kill", *driver)
    check(done, 56)
    assert ("THE ACCELERATORS ARE SIMULATED" in done.stdout) == ("hixl" in driver)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("driver", [[], ["--faults"], ["--driver", "hixl"]], ids=" ".join)
def test_many_requests_to_processes_that_are_killed(driver: list[str]) -> None:
    many = ["--requests", "200", "--longest", "800", "--blocks", "128", "--seed", "7", "--kill"]
    done = run_main(*many, *driver, seconds=350)
    check(done, 128)
    (cancelled,) = re.findall(r" (\d+) of 200 requests cancelled", done.stdout)
    (identical,) = re.findall(r"^IDENTICAL: (\d+) answers", done.stdout, re.MULTILINE)
    assert 0 < int(cancelled) <= 50
    assert int(identical) == 200 - int(cancelled)
