"""Fault plans: which transfers are delayed, held, failed or lost, by a seed, so that a run can be repeated."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from ..drivers import WRAPPER
from ..errors import InvalidArgumentError

__all__ = ["FaultCounts", "FaultPlan", "Part", "Status", "Verb", "faulty"]

#: Which operations a rule looks at; ``"note"``: a signal or notification without data; ``"call"``: the driver's own start
#: and shutdown, and what makes memory ready for peers and retires it.
Verb: TypeAlias = Literal["any", "transfer", "read", "write", "note", "call", "start", "shutdown", "ready", "retire"]
#: What a delay holds back: the whole operation, the report of its outcome, or its signal and notification.
Part: TypeAlias = Literal["operation", "outcome", "note"]
#: How an operation fails.
Status: TypeAlias = Literal[
    "invalid", "range", "rights", "unsupported", "nomem", "busy", "link", "cancelled", "timeout", "protocol", "system"
]

_VERBS: dict[str, int] = {
    "read": 1, "write": 2, "transfer": 3, "note": 4, "any": 7, "start": 8, "shutdown": 16, "ready": 32, "retire": 64,
    "connect": 128, "call": 248,
}  # fmt: skip
_PARTS: dict[str, int] = {"operation": 0, "outcome": 1, "note": 2}
_STATUS: dict[str, int] = {
    "invalid": 1, "range": 2, "rights": 3, "unsupported": 4, "nomem": 5, "busy": 6, "link": 7, "cancelled": 8,
    "timeout": 9, "protocol": 10, "system": 11,
}  # fmt: skip
_KINDS: dict[str, int] = {
    "delay": 1, "bandwidth": 2, "hold": 3, "late": 4, "fail": 5, "reorder": 6, "drop_peer": 7, "busy": 8, "pending": 9,
    "stall": 10, "stuck": 11,
}  # fmt: skip
_RELEASE, _BREAK, _SAY = 1, 2, 3
_LAYOUT, _RULES = 1, 64


class FaultCounts(NamedTuple):
    """What a plan has injected so far."""

    #: Operations that were looked at: every read, write, batch, signal and notification.
    ops: int
    #: Delayed in whole or in part.
    delayed: int
    #: Put on the virtual wire.
    paced: int
    #: Held by `hold`.
    held: int
    #: Stopped halfway by `stall`.
    stalled: int
    #: Let go by `release`.
    released: int
    #: Held by `late`.
    late: int
    #: Late ones whose bytes landed after their failure had been reported.
    landed_late: int
    #: Failed by `fail`.
    failed: int
    #: Completed in another order than submitted.
    reordered: int
    #: Links broken.
    broken: int
    #: Refused.
    busy: int
    #: Finished by another thread because of `pending`.
    pending: int
    #: Gauge: operations that wait for `release` now.
    holding: int


class _Rule(ctypes.Structure):
    """``faulty_rule`` of drivers/faulty/control.h."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("part", ctypes.c_uint32),
        ("verbs", ctypes.c_uint32),
        ("chance", ctypes.c_uint32),
        ("first", ctypes.c_uint64),
        ("every", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("index", ctypes.c_int64),
        ("status", ctypes.c_int32),
        ("native", ctypes.c_int32),
        ("scope", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("seen", ctypes.c_uint64),
    )


class _Block(ctypes.Structure):
    """``faulty_block`` of drivers/faulty/control.h: what plan and driver share."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("rules", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("command", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in FaultCounts._fields),
        ("rule", _Rule * _RULES),
    )

    def __fspath__(self) -> str:
        # A driver's options are text; the engine keeps the option itself, and so this block, alive.
        return hex(ctypes.addressof(self))


_Command = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64)


class _Saying(ctypes.Structure):
    """``faulty_message`` of drivers/faulty/control.h."""

    _fields_ = (("data", ctypes.c_char_p), ("len", ctypes.c_uint32))


class FaultPlan:
    """A list of faults, given to an engine by ``drivers=faulty("shm", plan)``.

    Every method adds one rule and returns the plan.  Rules look at operations as they are submitted, and count those
    that they look at from the moment they are added, so ``fail(nth=1)`` means the next one.  Common to all rules:

    * ``nth=3``: only the third; ``every=3``: the third, the sixth, ...; neither: all,
    * ``count=2``: at most two of them,
    * ``chance=0.1``: and of those a tenth, drawn by the seed,
    * ``verb="write"``: looks only at writes; ``"read"``, ``"note"`` (bare notifications and signals), ``"transfer"``
      (reads and writes), ``"any"`` of these.  `delay`, `hold`, `pending` and `fail` also know the calls of a driver whose
      transport blocks: ``"start"``, ``"shutdown"``, ``"connect"`` (of a link), ``"ready"`` and ``"retire"`` (of memory), or
      ``"call"`` for all.

    Rules can be added while engines run.  A plan may serve several engines; they share its counters.

    :param seed: of all that is random; default: a new one, shown by ``repr``, which is an expression that makes the
        same plan.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(32) if seed is None else seed
        if not 0 <= self.seed < 1 << 64:
            raise InvalidArgumentError(f"seed must be in 0..2**64-1, not {seed!r}")
        self._rules: list[tuple[str, dict[str, Any]]] = []
        self._block = _Block(version=_LAYOUT, seed=self.seed)

    def __repr__(self) -> str:
        calls = (f".{name}({', '.join(f'{k}={v!r}' for k, v in words.items())})" for name, words in self._rules)
        return f"FaultPlan(seed={self.seed}){''.join(calls)}"

    # -- rules

    def delay(
        self,
        low: float,
        high: float | None = None,
        *,
        part: Part = "operation",
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "any",
    ) -> Self:
        """Delays by `low`, or by between `low` and `high` seconds.

        :param part: ``"operation"``: bytes land late; ``"outcome"``: they land at once and the report is late;
            ``"note"``: data in time, signal and notification later.
        """
        high = low if high is None else high
        if not 0 <= low <= high < 1e6 or part not in _PARTS:
            raise InvalidArgumentError(f"delay must be 0 <= low <= high seconds of a part ({', '.join(_PARTS)})")
        return self._add(
            "delay", _some(low=low, high=None if high == low else high, part=None if part == "operation" else part),
            nth, every, count, chance, verb, part=_PARTS[part], low=_ns(low), high=_ns(high),
        )  # fmt: skip

    def bandwidth(self, rate: float, *, verb: Verb = "any") -> Self:
        """Paces every link to `rate` bytes per second: one virtual wire, both directions, first in, first out."""
        if not 1 <= rate < 1 << 62:
            raise InvalidArgumentError(f"rate must be at least one byte per second, not {rate!r}")
        return self._add("bandwidth", {"rate": rate}, None, None, None, 1.0, verb, low=int(rate))

    def pending(
        self,
        *,
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "any",
    ) -> Self:
        """Never finishes inside the call: the outcome comes from another thread, as with a network."""
        return self._add("pending", {}, nth, every, count, chance, verb)

    def hold(
        self,
        *,
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "any",
    ) -> Self:
        """Holds operations, unsent, until `release`; a cancelled one never lands."""
        return self._add("hold", {}, nth, every, count, chance, verb)

    def late(
        self,
        *,
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "any",
    ) -> Self:
        """Holds operations until `release`; one that is cancelled or timed out meanwhile lands all the same, later.

        Its memory stays pinned until then, as with a transport that cannot take work back.
        """
        return self._add("late", {}, nth, every, count, chance, verb)

    def stuck(
        self,
        *,
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "any",
    ) -> Self:
        """Holds operations, unsent, until `release`, and no cancel reaches them, as with a transport that hangs.

        What runs out of time is given up by the driver, and its memory is free again; what is cancelled is not.
        """
        return self._add("stuck", {}, nth, every, count, chance, verb)

    def stall(
        self,
        after: float = 0.5,
        *,
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "transfer",
    ) -> Self:
        """Moves the first part (`after`, 0..1) of the bytes, then nothing until `release`."""
        if not 0 <= after < 1:
            raise InvalidArgumentError(f"after must be in 0..1, not {after!r}")
        return self._add("stall", {"after": after}, nth, every, count, chance, verb, low=round(after * 1e6))

    def fail(
        self,
        status: Status = "system",
        *,
        native: int = 0,
        index: int | None = None,
        link: bool = False,
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "any",
    ) -> Self:
        """Fails operations after they were accepted.

        :param native: the transport's own code.
        :param index: the failed descriptor; those before it land.  Default: unknown, nothing lands.
        :param link: the failure breaks the whole link.
        """
        if status not in _STATUS:
            raise InvalidArgumentError(f"status must be one of {', '.join(_STATUS)}, not {status!r}")
        words = _some(status=status, native=native or None, index=index, link=link or None)
        return self._add(
            "fail", words, nth, every, count, chance, verb,
            status=_STATUS[status], native=native, index=-1 if index is None else index, scope=int(link),
        )  # fmt: skip

    def busy(
        self,
        *,
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "any",
    ) -> Self:
        """Refuses operations: the call raises BusyError and nothing is sent."""
        return self._add("busy", {}, nth, every, count, chance, verb)

    def reorder(self, window: int = 4, within: float = 0.01, *, chance: float = 1.0, verb: Verb = "any") -> Self:
        """Collects `window` operations of a link, or those of `within` seconds, and runs them in another order."""
        if not 2 <= window <= 1 << 16 or not 0 < within < 1e6:
            raise InvalidArgumentError("window must be at least 2 operations, within a positive number of seconds")
        words = {"window": window, "within": within}
        return self._add("reorder", words, None, None, None, chance, verb, low=window, high=_ns(within))

    def drop_peer(
        self,
        *,
        nth: int | None = None,
        every: int | None = None,
        count: int | None = None,
        chance: float = 1.0,
        verb: Verb = "any",
    ) -> Self:
        """The operation finds the link broken, and its peer is lost.  See `break_links` for doing it now."""
        return self._add("drop_peer", {}, nth, every, count, chance, verb)

    def clear(self) -> Self:
        """Forgets all rules; what is delayed or held stays so."""
        self._rules.clear()
        self._block.rules = 0
        return self

    def _add(
        self,
        name: str,
        words: Mapping[str, Any],
        nth: int | None,
        every: int | None,
        count: int | None,
        chance: float,
        verb: Verb,
        **fields: int,
    ) -> Self:
        if len(self._rules) == _RULES:
            raise InvalidArgumentError(f"a plan has at most {_RULES} rules")
        if verb not in _VERBS:
            raise InvalidArgumentError(f"verb must be one of {', '.join(_VERBS)}, not {verb!r}")
        if not 0 <= chance <= 1:
            raise InvalidArgumentError(f"chance must be in 0..1, not {chance!r}")
        for what, value in (("nth", nth), ("every", every), ("count", count)):
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{what} counts from 1, it cannot be {value!r}")
        shown = _some(
            nth=nth,
            every=every,
            count=count,
            chance=chance if chance != 1 else None,
            verb=verb if verb != ("transfer" if name == "stall" else "any") else None,
        )
        step = every or 1
        self._block.rule[len(self._rules)] = _Rule(
            kind=_KINDS[name],
            verbs=_VERBS[verb],
            chance=round(chance * 1e6),
            first=nth or step,
            every=step,
            count=count or (1 if nth is not None and every is None else 0),
            **fields,
        )
        self._rules.append((name, {**words, **shown}))
        # The rule is complete before the driver may look at it.
        self._block.rules = len(self._rules)
        return self

    # -- commands

    def release(self, n: int | None = None) -> None:
        """Lets go of all that is held, or of the `n`-th oldest of it (from 1).

        On the loop's thread the work is with the wrapped driver when this returns; on others it soon will be.
        """
        if n is not None and n < 1:
            raise InvalidArgumentError(f"n counts from 1, it cannot be {n!r}")
        self._command(_RELEASE, n or 0)

    def break_links(self) -> None:
        """Breaks every link of the engines that use this plan, now: their peers are lost."""
        self._command(_BREAK, 0)

    def say(self, data: bytes) -> None:
        """Lets the driver of every link of the engines that use this plan send a message to the driver at its other end.

        One under a plan shows it as a notification of topic ``faulty.said``; others may not take it.
        """
        saying = _Saying(data, len(data))
        self._command(_SAY, ctypes.addressof(saying))

    def _command(self, what: int, argument: int) -> None:
        if self._block.command:
            _Command(self._block.command)(ctypes.addressof(self._block), what, argument)

    # -- what happened

    @property
    def counts(self) -> FaultCounts:
        """What was injected so far."""
        return FaultCounts(*(getattr(self._block, name) for name in FaultCounts._fields))

    @property
    def holding(self) -> int:
        """Operations that wait for `release`."""
        return int(self._block.holding)

    # -- to another process

    def spec(self) -> dict[str, Any]:
        """The plan as JSON-safe data; `parse` makes it again, with counters at zero."""
        return {"seed": self.seed, "rules": [[name, dict(words)] for name, words in self._rules]}

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> FaultPlan:
        """The plan that `spec` described.

        :raises InvalidArgumentError: if it describes none.
        """
        try:
            plan = cls(spec["seed"])
            for name, words in spec["rules"]:
                if name not in _KINDS:
                    raise InvalidArgumentError(f"a plan has no rule {name!r}")
                getattr(plan, name)(**words)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidArgumentError):
                raise
            raise InvalidArgumentError(f"not the spec of a plan: {error}") from error
        return plan


def faulty(driver: str, plan: FaultPlan, **options: Any) -> dict[str, dict[str, Any]]:
    """What ``Engine(drivers=...)`` takes to run `driver` under `plan`; peers see the driver by its own name.

    :param options: for the wrapped driver.
    """
    inner = {f"inner.{key}": value for key, value in options.items()}
    return {driver: {WRAPPER: "faulty", "control": plan._block, **inner}}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _some(**words: Any) -> dict[str, Any]:
    return {key: value for key, value in words.items() if value is not None}
