"""Fault plans, which delay, hold, fail or lose operations; a seed makes their random choices repeatable."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from ..drivers import WRAPPER
from ..errors import InvalidArgumentError

__all__ = ["FaultCounts", "FaultPlan", "Part", "Status", "Verb", "faulty"]

#: The operations to which a rule applies; ``"note"``: a signal or notification without data; ``"call"``: the driver's own
#: start and shutdown, the connecting of a link, and the calls that make memory ready for peers and retire it.
Verb: TypeAlias = Literal["any", "transfer", "read", "write", "note", "call", "start", "shutdown", "ready", "retire"]
#: The part that is delayed: the whole operation, the report of its outcome, or its signal and notification.
Part: TypeAlias = Literal["operation", "outcome", "note"]
#: The kind of failure of an operation.
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
    """The numbers of faults that a plan has injected so far, by kind."""

    #: Operations that the plan has seen: every read, write, batch, signal and notification.
    ops: int
    #: Operations that were delayed in whole or in part.
    delayed: int
    #: Operations that were limited by `bandwidth`.
    paced: int
    #: Operations that `hold` held.
    held: int
    #: Operations that `stall` stopped halfway.
    stalled: int
    #: Operations that `release` released.
    released: int
    #: Operations that `late` held.
    late: int
    #: Operations of `late` whose bytes landed after their failure had been reported.
    landed_late: int
    #: Operations that `fail` failed.
    failed: int
    #: Operations that completed in another order than submitted.
    reordered: int
    #: Links that were broken.
    broken: int
    #: Operations that were refused.
    busy: int
    #: Operations that another thread finished because of `pending`.
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
    """``faulty_block`` of drivers/faulty/control.h: the memory that plan and driver share."""

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

    Every method of a rule adds it and returns the plan.  A rule sees operations as they are submitted, and counts them from the
    moment it is added, so that ``fail(nth=1)`` means the next one.  Common to all rules:

    * ``nth=3``: only the third operation; ``every=3``: the third, the sixth, ...; neither: all,
    * ``count=2``: at most two of them,
    * ``chance=0.1``: a tenth of those, drawn by the seed,
    * ``verb="write"``: only writes; ``"read"``, ``"note"`` (bare notifications and signals), ``"transfer"`` (reads and writes),
      or ``"any"`` of these.  `delay`, `hold`, `pending` and `fail` also apply to the calls of a driver whose transport blocks:
      ``"start"``, ``"shutdown"``, ``"connect"`` (of a link), ``"ready"`` and ``"retire"`` (of memory), or ``"call"`` for all.

    Rules can be added while engines run.  Several engines may use one plan; they share its counters.  A rule raises
    `InvalidArgumentError` if an argument is out of range, or the plan has 64 rules already.

    :param seed: the seed of all random choices, an integer in 0..2**64-1; default: a new one.  ``repr`` of a plan is an
        expression that makes the same plan.
    :raises InvalidArgumentError: if `seed` is out of range.
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
        """Delay operations.

        :param low: the least delay, in seconds.
        :param high: the greatest delay, in seconds; default: `low`.
        :param part: ``"operation"``: the bytes land late; ``"outcome"``: they land at once and the report is late;
            ``"note"``: only the signal and the notification are late.
        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations that are delayed.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
        """
        high = low if high is None else high
        if not 0 <= low <= high < 1e6 or part not in _PARTS:
            raise InvalidArgumentError(f"delay must be 0 <= low <= high seconds of a part ({', '.join(_PARTS)})")
        return self._add(
            "delay", _some(low=low, high=None if high == low else high, part=None if part == "operation" else part),
            nth, every, count, chance, verb, part=_PARTS[part], low=_ns(low), high=_ns(high),
        )  # fmt: skip

    def bandwidth(self, rate: float, *, verb: Verb = "any") -> Self:
        """Limit the bandwidth of every link, both directions together: first in, first out.

        :param rate: bytes per second, at least 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
        """
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
        """Finish operations outside of the call: the outcome comes from another thread, as with a network.

        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations that are affected.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
        """
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
        """Hold operations, unsent, until `release`; a cancelled one never lands.

        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations that are held.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
        """
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
        """Hold operations until `release`; one that is cancelled or timed out meanwhile lands all the same, later.

        Its memory stays pinned until then, as with a transport that cannot revoke work.

        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations that are held.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
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
        """Hold operations, unsent, until `release`, beyond the reach of cancel, as with a transport that hangs.

        The driver gives up an operation that times out, and releases its memory; it does not give up one that is cancelled.

        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations that are held.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
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
        """Move the first part of an operation's bytes, then nothing until `release`.

        :param after: the fraction of the bytes that moves, from 0 and below 1.
        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations that are stalled.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
        """
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
        """Fail operations after they were accepted.

        :param status: the kind of failure.
        :param native: the transport's own code.
        :param index: the index of the failed descriptor; those before it land.  Default: unknown, and no byte lands.
        :param link: True if the failure breaks the whole link.
        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations that fail.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
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
        """Refuse operations: the call raises `BusyError`, and nothing is sent.

        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations that are refused.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
        """
        return self._add("busy", {}, nth, every, count, chance, verb)

    def reorder(self, window: int = 4, within: float = 0.01, *, chance: float = 1.0, verb: Verb = "any") -> Self:
        """Collect operations of a link, and run them in another order.

        :param window: the number of operations that are collected, at least 2.
        :param within: the most seconds for which an operation waits for the others.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
        """
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
        """Break the link of an operation, so that its peer is lost; `break_links` breaks all links at once.

        :param nth: only the operation with this number, from 1.
        :param every: every operation whose number is a multiple of this.
        :param count: the most operations whose link breaks.
        :param chance: the probability of the fault, 0 to 1.
        :param verb: the kind of operations.
        :return: the plan.
        :raises InvalidArgumentError: if an argument is out of range, or the plan is full.
        """
        return self._add("drop_peer", {}, nth, every, count, chance, verb)

    def clear(self) -> Self:
        """Remove all rules; operations that are delayed or held stay delayed or held.

        :return: the plan.
        """
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
        # The rule is complete before the driver may read it.
        self._block.rules = len(self._rules)
        return self

    # -- commands

    def release(self, n: int | None = None) -> None:
        """Release the operations that are held.

        On the loop's thread they are submitted to the wrapped driver before this returns, on other threads soon afterwards.

        :param n: the number of the operation, from 1 for the oldest; default: all.
        :raises InvalidArgumentError: if `n` is less than 1.
        """
        if n is not None and n < 1:
            raise InvalidArgumentError(f"n counts from 1, it cannot be {n!r}")
        self._command(_RELEASE, n or 0)

    def break_links(self) -> None:
        """Break every link of the engines that use this plan, so that their peers are lost."""
        self._command(_BREAK, 0)

    def say(self, data: bytes) -> None:
        """Send a message to the driver at the other end of every link of the engines that use this plan.

        A driver under a plan shows it as a notification of topic ``faulty.said``; other drivers may refuse it.

        :param data: the bytes of the message.
        """
        saying = _Saying(data, len(data))
        self._command(_SAY, ctypes.addressof(saying))

    def _command(self, what: int, argument: int) -> None:
        if self._block.command:
            _Command(self._block.command)(ctypes.addressof(self._block), what, argument)

    # -- counters

    @property
    def counts(self) -> FaultCounts:
        """The faults that were injected so far."""
        return FaultCounts(*(getattr(self._block, name) for name in FaultCounts._fields))

    @property
    def holding(self) -> int:
        """The number of operations that wait for `release`."""
        return int(self._block.holding)

    # -- transport to another process

    def spec(self) -> dict[str, Any]:
        """Return the plan as JSON-safe data, from which `parse` makes an equal plan with counters at zero."""
        return {"seed": self.seed, "rules": [[name, dict(words)] for name, words in self._rules]}

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> FaultPlan:
        """Make a plan from the result of `spec`.

        :param spec: the result of `spec`, perhaps of another process.
        :return: an equal plan, with counters at zero.
        :raises InvalidArgumentError: if it is malformed.
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
            raise InvalidArgumentError(f"not the result of FaultPlan.spec(): {error}") from error
        return plan


def faulty(driver: str, plan: FaultPlan, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the ``drivers=`` of an engine that runs a driver under a plan; peers see the driver by its own name.

    :param driver: the name of the driver.
    :param plan: the faults.
    :param options: the options of the wrapped driver.
    :return: a mapping for ``drivers=``.
    """
    inner = {f"inner.{key}": value for key, value in options.items()}
    return {driver: {WRAPPER: "faulty", "control": plan._block, **inner}}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _some(**words: Any) -> dict[str, Any]:
    return {key: value for key, value in words.items() if value is not None}
