"""The settings of an engine; the only reader of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..display import shown
from ..errors import InvalidArgumentError
from ..types import Address
from .arguments import number_of, positive_seconds
from .frozen import frozen

__all__ = ["DEFAULT_DRIVERS", "Drivers", "EngineConfig", "parse_address"]

#: The drivers that an engine opens when neither ``drivers=`` nor ``HIXL_ASYNC_DRIVERS`` says otherwise.
DEFAULT_DRIVERS = ("shm",)

#: A list of names, or names with options for each, e.g. ``{"shm": {"threads": 2}}``.
Drivers = Sequence[str] | Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine; immutable."""

    #: The address to listen on, or None for an engine that only dials.
    address: Address | None
    #: The name that peers see; shown in errors and logs.
    name: str
    #: The tenant; engines of different domains never connect.
    domain: str = "default"
    #: The shared secret, at least 8 bytes; with None only processes of the same user on this host are admitted.
    secret: bytes | None = field(default=None, repr=False)
    #: Driver names in order of preference, with the options of each; a copy that cannot be changed.
    drivers: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {name: {} for name in DEFAULT_DRIVERS})
    #: The folder of the Unix socket, for containers that share one; with None the socket has a name without a file.
    unix_dir: str | None = None
    #: Seconds without progress after which a transfer fails.
    stall: float = 10.0
    #: Seconds that `connect` may take.
    connect_timeout: float = 5.0
    #: Seconds that `aclose` waits for work in flight and for peers to release memory.
    close_timeout: float = 5.0
    #: The most notifications kept per subscription, and for topics without a subscriber.
    notification_limit: int = 4096
    #: The most notifications of a peer, and the most completions, taken in one pass of the loop.
    notify_batch_size: int = 256
    #: The most bytes of transfers in flight together, or None for no limit.
    max_bytes_in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.address is not None:
            parse_address(self.address)
        for name in ("stall", "connect_timeout", "close_timeout"):
            positive_seconds(name, getattr(self, name))
        for name in ("name", "domain"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= 128:
                raise InvalidArgumentError(
                    f"{name} must be a string of 1 to 128 printable characters, not {shown(value)}"
                )
        if self.secret is not None:
            if not isinstance(self.secret, bytes):
                raise InvalidArgumentError(f"secret must be bytes or a string, not {type(self.secret).__name__}")
            if len(self.secret) < 8:
                raise InvalidArgumentError("secret must have at least 8 bytes; use for example secrets.token_bytes(32)")
        if self.unix_dir is not None and not _is_path(self.unix_dir):
            raise InvalidArgumentError(f"unix_dir must be the path of a folder or None, not {shown(self.unix_dir)}")
        for name in ("notification_limit", "notify_batch_size"):
            object.__setattr__(self, name, number_of("messages", name, getattr(self, name), 1, 31))
        if (most := self.max_bytes_in_flight) is not None:
            object.__setattr__(self, "max_bytes_in_flight", number_of("bytes", "max_bytes_in_flight", most, 1, 62))
        if not isinstance(self.drivers, Mapping):
            raise InvalidArgumentError(f"drivers must map names to options, not {shown(self.drivers)}")
        if not self.drivers:
            raise InvalidArgumentError("drivers is empty; name at least one, for example drivers=['shm']")
        for driver, options in self.drivers.items():
            if not isinstance(driver, str) or not isinstance(options, Mapping):
                raise InvalidArgumentError(f"drivers maps names to options, not {shown(driver)} to {shown(options)}")
        try:
            object.__setattr__(self, "drivers", frozen(self.drivers))
        except RecursionError:
            raise InvalidArgumentError("drivers holds a mapping or list that contains itself") from None

    @classmethod
    def build(
        cls,
        address: str | Address | None,
        *,
        name: str | None = None,
        secret: str | bytes | None = None,
        drivers: Drivers | None = None,
        notify_batch_size: int | None = None,
        **settings: Any,
    ) -> EngineConfig:
        """Build a configuration from arguments, then the environment, then defaults.

        The environment variables are ``HIXL_ASYNC_SECRET``, ``HIXL_ASYNC_DRIVERS`` (names separated by commas) and
        ``HIXL_NOTIFY_BATCH_SIZE``.

        :param address: the address to listen on, as text or `Address`; None for an engine that only dials.
        :param name: the name that peers see; by default it contains the process id.
        :param secret: the shared secret, at least 8 bytes; text is encoded as UTF-8.
        :param drivers: names in order of preference, or a mapping of names to options.
        :param notify_batch_size: the most notifications of a peer, and the most completions, taken in one pass of the loop.
        :param settings: the other fields of this class.
        :return: the configuration.
        :raises InvalidArgumentError: if a setting is malformed or unknown.
        """
        if secret is None:
            secret = os.environ.get("HIXL_ASYNC_SECRET") or None
        if drivers is None:
            listed = os.environ.get("HIXL_ASYNC_DRIVERS", "")
            drivers = [word.strip() for word in listed.split(",") if word.strip()] or DEFAULT_DRIVERS
        if not isinstance(drivers, Mapping):
            drivers = {driver: {} for driver in _names(drivers)}
        if notify_batch_size is None:
            text = os.environ.get("HIXL_NOTIFY_BATCH_SIZE", "")
            try:
                notify_batch_size = int(text) if text else cls.notify_batch_size
            except ValueError:
                raise InvalidArgumentError(f"HIXL_NOTIFY_BATCH_SIZE must be a whole number, not {text!r}") from None
        unknown = settings.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise InvalidArgumentError(f"unknown setting {', '.join(sorted(unknown))} of Engine")
        return cls(
            address=None if address is None else parse_address(address),
            name=name if name is not None else f"engine-{os.getpid()}",
            secret=_encoded(secret) if isinstance(secret, str) else secret,
            drivers=drivers,
            notify_batch_size=notify_batch_size,
            **settings,
        )


def _is_path(path: object) -> bool:
    try:
        return isinstance(path, str) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _encoded(secret: str) -> bytes:
    try:
        return secret.encode()
    except UnicodeEncodeError:  # not shown, since it is secret
        raise InvalidArgumentError(
            "secret holds half a surrogate pair, which UTF-8 cannot carry; pass bytes, for example secrets.token_bytes(32)"
        ) from None


def _names(drivers: Any) -> list[str]:
    names = None
    if not isinstance(drivers, str):
        with suppress(TypeError):  # not iterable
            names = list(drivers)
    if names is None or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"drivers must be a list of names or a mapping, not {shown(drivers)}")
    return names


def parse_address(address: str | Address) -> Address:
    """Return the `Address` for a text, and raise this package's error if it is malformed.

    :raises InvalidArgumentError: if `address` is not an address.
    """
    try:
        return Address.parse(address)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
