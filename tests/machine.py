"""State machines of which hypothesis draws a whole program at once: a list of numbers, each an event and its details.

`hypothesis.stateful` draws a rule, looks whether it is possible, and draws again.  A machine most of whose events are
impossible most of the time spends more than half of its time in that; here an event takes one draw.  Numbers that shrink
choose the first options, and zero is no event, so that failures become short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from hypothesis import given, note, settings
from hypothesis import strategies as st

T = TypeVar("T")

#: Bytes of a number: enough for an event and the order of some thirty things.
NUMBER = 16


class Choices:
    """The details of an event, which are taken out of its number one by one."""

    def __init__(self, number: int) -> None:
        self._rest = number

    def below(self, count: int) -> int:
        self._rest, choice = divmod(self._rest, count)
        return choice

    def between(self, first: int, last: int) -> int:
        """Return a number from first to last, both included."""
        return first + self.below(last - first + 1)

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def some_of(self, options: Sequence[T], least: int = 0) -> list[T]:
        """Return some options, in their order, and at least that many."""
        chosen = [option for option in options if self.flag()]
        return chosen if len(chosen) >= least else list(options[:least])

    def shuffled(self, options: Sequence[T]) -> list[T]:
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in options]

    def flag(self) -> bool:
        return bool(self.below(2))

    def seldom(self) -> bool:
        """Return True once in five times: for what ends things, so that they get anywhere."""
        return self.below(5) == 4


class Event(Protocol):
    """A method of a machine that `event` has marked."""

    __name__: str
    possible: Callable[[Any], object]

    def __call__(self, machine: Any, choose: Choices, /) -> None: ...


def event(possible: Callable[[Any], object] = lambda machine: True) -> Callable[[Any], Any]:
    """Mark a method as an event of its machine.

    :param possible: whether it can happen now, of the machine.
    """

    def mark(method: Any) -> Any:
        method.possible = possible
        return method

    return mark


class Machine:
    """What happens, in any order, and what always holds."""

    events: ClassVar[list[Event]]

    def __init_subclass__(cls) -> None:
        cls.events = [method for method in vars(cls).values() if hasattr(method, "possible")]

    def begin(self, choose: Choices) -> None:
        """Make what the events change."""
        raise NotImplementedError

    def check(self) -> None:
        """Check what always holds; called after every event."""

    def end(self) -> None:
        """Let everything end, and check that it has; called after the last event."""

    def play(self, program: Sequence[bytes]) -> None:
        """Begin, let the events of a program happen, and end.

        Programs differ in the events that they leave out, which are taken only if no others are possible.
        """
        first, absent, *numbers = (int.from_bytes(number, "little") for number in program)
        choose = Choices(absent)
        share = choose.below(8)
        common = [event for event in self.events if choose.below(16) >= share]
        self.begin(Choices(first))
        self.check()
        for number in filter(None, numbers):
            choose = Choices(number)
            possible = [event for event in common if event.possible(self)]
            if not possible:
                possible = [event for event in self.events if event.possible(self)]
            chosen = choose.one_of(possible)
            note(chosen.__name__)
            chosen(self, choose)
            self.check()
        note("the end")
        self.end()


def programs(machine: type[Machine], count: int, steps: int) -> Callable[[], None]:
    """Return a test that plays random programs.

    :param count: how many.
    :param steps: of how many events, on average.
    """
    number = st.binary(min_size=NUMBER, max_size=NUMBER)

    @settings(max_examples=count, deadline=None)
    @given(st.lists(number, min_size=2 + steps // 2, max_size=2 + steps + steps // 2))
    def test(program: list[bytes]) -> None:
        machine().play(program)

    return test
