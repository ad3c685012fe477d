"""Layers over a paced link, and the carriers that the sweep compares; the programs verify the bytes themselves."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("numpy")

from rig.carriers import CARRIERS, Load
from rig.prefill import Course, run_requests
from rig.shapes import SHAPES

from hixl_async.kv import Group

from .program import report

pytestmark = pytest.mark.timeout(120)


def test_streaming() -> None:
    content = report(
        *("streaming.py", "--quick", "--loop", "asyncio", "--models", "Llama-3-70B", "--tokens", "64", "--turns", "2"),
        *("--rate", "1e9"),
    )
    assert content["rate"] == 1e9
    layer, exposed, whole = content["figures"]
    assert [one["level"] for one in (layer, exposed, whole)] == ["layer", "exposed", "whole"]
    assert {(one["part"], one["case"], one["bytes"]) for one in content["figures"]} == {
        ("streaming", "Llama-3-70B", 64 * 512)
    }
    # 32 KiB at 1 GB/s: the link is really paced, and what is left is more than nothing.
    assert layer["value"]["low"] >= 32_768
    assert exposed["value"]["low"] > 0
    assert whole["ratio"]["median"] == pytest.approx(80)


def test_sweep() -> None:
    content = report(
        *("sweep.py", "--quick", "--loop", "asyncio", "--tokens", "48", "--requests", "1", "5", "--turns", "2"),
        *("--carriers", "hixl_async", "sockets", "--model", "SmolLM2-135M", "--ranks", "1", "--slots", "2"),
    )
    assert (content["model"], content["ranks"], content["missing"]) == ("SmolLM2-135M", 1, {})
    assert content["flops"] == 150e12
    cases = {(one["carrier"], one["tokens"], one["requests"]): one for one in content["cases"]}
    assert list(cases) == [(name, 48, count) for count in (1, 5) for name in ("hixl_async", "sockets")]
    for case in cases.values():
        assert case["layer_bytes"] == 48 * 768
        assert len(case["turns"]) == 2
        for turn in case["turns"]:
            assert turn.keys() == {
                *(
                    "opening_ns",
                    "latency_ns",
                    "exposed_ns",
                    "first_token_ns",
                    "last_token_ns",
                    "tokens_per_s",
                    "cpu_s_per_GB",
                )
            }
            assert 0 < turn["exposed_ns"] <= turn["first_token_ns"] <= turn["last_token_ns"]
            assert turn["tokens_per_s"] == pytest.approx(48 * case["requests"] / turn["last_token_ns"] * 1e9)


@pytest.mark.parametrize("name", ["hixl_async", "sockets"])
async def test_wrong_bytes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(Group.attention(2, 1, 8, "bfloat16"), 4, 8, 1, "asyncio")
    async with CARRIERS[name](load) as carrier:
        (course,) = await run_requests(carrier, 1, 2, 1, 0.001, check=True)
        assert len(course.latencies) == 2
        right = carrier.checksums
        monkeypatch.setattr(carrier, "checksums", lambda request: [one ^ 1 for one in right(request)])
        with pytest.raises(ExceptionGroup, match="unhandled") as caught:
            await run_requests(carrier, 1, 2, 1, 0.001, check=True)
        assert "other bytes" in str(caught.value.exceptions[0])


async def test_requests_wait_for_blocks() -> None:
    """A request that is not transferred yet delays others, and its layers take as long as they should."""

    class Slow:
        name = "slow"
        open = most = 0

        async def begin(self, check: bool) -> Any:
            self.open += 1
            self.most = max(self.most, self.open)
            return self

        def push(self, layer: int) -> None: ...

        async def landed(self) -> tuple[list[int], list[int]]:
            self.open -= 1
            return [time.monotonic_ns()] * 2, []

        def checksums(self, request: Any) -> list[int]:
            return []

        def cpu_ns(self) -> int:
            return 0

    carrier = Slow()
    courses = await run_requests(carrier, 5, 2, 2, 0.002)
    assert carrier.most <= 2
    assert len(courses) == 5
    assert all(course.computed[1] - course.computed[0] > 0 for course in courses)


def test_what_a_course_says() -> None:
    course = Course(100, [200, 300], [350, 340])
    assert (course.first_token, course.exposed, course.latencies) == (250, 50, [150, 40])


@pytest.mark.parametrize(
    ("name", "ranks", "token_bytes", "run_bytes"),
    [("Llama-3-70B", 8, 80 * 512, 4096), ("Llama-3-70B", 1, 320 << 10, 32 << 10), ("DeepSeek-V3", 8, 61 * 1152, 9216)],
)
def test_shapes(name: str, ranks: int, token_bytes: int, run_bytes: int) -> None:
    """The sizes are the published ones of these models; every rank holds the whole of a latent."""
    load = Load(SHAPES[name].group(ranks), 16, 16, 1, "asyncio")
    assert load.nbytes == sum(load.view.tensor_bytes) == 16 * token_bytes
    assert load.block_bytes == run_bytes


def test_computing_takes_as_long_as_a_device_would() -> None:
    shape = SHAPES["Llama-3-8B"]
    assert shape.layer_seconds(4096, 8, 150e12) * shape.layers == pytest.approx(2 * 8e9 * 4096 / 1.2e15)
