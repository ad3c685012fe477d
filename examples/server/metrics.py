"""What Prometheus may know of the server."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .generation import Generation
from .processes import Processes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        histogram = partial(Histogram, buckets=SECONDS, registry=self._registry)
        self._first = histogram("server_time_to_first_token_seconds", "From the request to its first token")
        self._gap = histogram("server_token_gap_seconds", "Between two tokens of an answer")
        self._tokens = Counter("server_tokens", "Tokens", ["kind"], registry=self._registry)
        self._ended = Counter("server_requests", "Requests that have ended", ["outcome"], registry=self._registry)
        self._requests = Gauge("server_current_requests", "Requests under way", ["state"], registry=self._registry)
        self._blocks = Gauge("server_blocks", "Blocks of a pool", ["process", "state"], registry=self._registry)
        self._up = Gauge("server_process_up", "1 while a process is there", ["process"], registry=self._registry)
        self._starts = Gauge("server_process_starts", "Starts of a process", ["process"], registry=self._registry)
        for outcome in ("finished", "cancelled", "failed", "refused"):
            self._ended.labels(outcome)

    def token(self, generation: Generation, before: float | None) -> None:
        """Count a token that has just come, and the time since the one before."""
        assert generation.last is not None
        if before is None:
            self._first.observe(generation.last - generation.asked)
        else:
            self._gap.observe(generation.last - before)

    def refuse(self) -> None:
        """Count a request for which there was no room."""
        self._ended.labels("refused").inc()

    def end(self, generation: Generation) -> None:
        """Count a request that has ended."""
        self._ended.labels(generation.outcome).inc()
        self._tokens.labels("prompt").inc(len(generation.prompt))
        self._tokens.labels("generated").inc(len(generation.tokens))

    def text(self, processes: Processes, states: list[str]) -> bytes:
        """Return all of them as text.

        :param states: of the requests that are under way.
        """
        for state in ("waiting", "arriving", "running"):
            self._requests.labels(state).set(states.count(state))
        self._blocks.clear()
        for name in ("P", "D"):
            self._up.labels(name).set(name in processes.states)
            self._starts.labels(name).set(processes.starts[name])
            for state, count in processes.states.get(name, {}).items():
                self._blocks.labels(name, state).set(count)
        return bytes(generate_latest(self._registry))
