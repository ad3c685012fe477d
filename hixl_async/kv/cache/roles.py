"""The roles of a cache manager.  Pure."""

from __future__ import annotations

from enum import Enum

from ...errors import AccessError, InvalidArgumentError

__all__ = ["Duty", "Role"]


class Duty(Enum):
    """A kind of work in which a manager takes part."""

    #: Peers pull from it.
    SERVE_PULLS = "serve pulls"
    #: It pushes to peers.
    PUSH = "push"
    #: It pulls from peers.
    PULL = "pull"
    #: Peers push to it.
    ACCEPT_PUSHES = "accept pushes"


class Role(Enum):
    """The work in which a cache manager takes part."""

    #: Prefill: its caches are sources.  It pushes, and peers pull from it.
    PROMPT = "prompt"
    #: Decode: its caches are targets.  It pulls, and peers push to it.
    DECODER = "decoder"
    #: Both at once.
    MIX = "mix"

    @classmethod
    def parse(cls, value: Role | str) -> Role:
        """Return the `Role` for a word.

        :param value: ``"prompt"``, ``"decoder"``, ``"mix"``, or a `Role` already.
        :return: the role.
        :raises InvalidArgumentError: if `value` is none of these.
        """
        try:
            return cls(value)
        except ValueError:
            raise InvalidArgumentError(f"role must be 'prompt', 'decoder' or 'mix', not {value!r}") from None

    def allows(self, duty: Duty) -> bool:
        """Return True if a manager of this role does that work.

        :param duty: the kind of work.
        """
        return self is Role.MIX or (duty in (Duty.SERVE_PULLS, Duty.PUSH)) == (self is Role.PROMPT)

    def check(self, duty: Duty, who: str) -> None:
        """Return if a manager of this role does that work.

        :param duty: the kind of work.
        :param who: the manager, for the message.
        :raises AccessError: if it does not.
        """
        if not self.allows(duty):
            raise AccessError(f"{who} is a {self.value}, which does not {duty.value}; await manager.switch_role(...)")
