"""The regions of one engine: their creation, their registration with drivers, and their withdrawal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .. import _core
from .._core import Core
from ..core import in_flight, memory
from ..core.link import CAP_ALLOC, CAP_REGISTER, Driver
from ..core.log import Log
from ..core.memory import LocalMemory, LocalSlice
from ..display import shown
from ..errors import BusyError, ClosedError, DriverError, HixlError, InvalidArgumentError, RangeError
from ..types import Access, AccessLike, PeerState
from .arguments import number_of
from .closing import Closing
from .host import Host
from .peers import Peers
from .region import Region, operand, parse_access, require_region_name
from .regions import MAX_OFFERS

__all__ = ["RegionTable"]

log = Log("hixl_async")


class RegionTable:
    """All regions of an engine, by name and by number.

    :param core: the engine.
    :param drivers: its drivers, in order of preference; filled when the engine opens.
    :param peers: its peers, to which regions are offered.
    """

    def __init__(self, core: Core, drivers: Mapping[str, Driver], peers: Peers, host: Host) -> None:
        self._core = core
        self._drivers = drivers
        self._peers = peers
        self._host = host
        self._names: dict[str, Region] = {}
        self._numbers: dict[int, Region] = {}
        self._next_number = 1

    def get(self, number: int) -> Region | None:
        """Return the region with a number, or None."""
        return self._numbers.get(number)

    def all(self) -> list[Region]:
        """Return all regions."""
        return list(self._numbers.values())

    def by_name(self) -> dict[str, Region]:
        """Return all regions by name."""
        return dict(self._names)

    # -- making

    def allocate(self, name: str, size: int, access: AccessLike, grant: Callable[[Any], AccessLike] | None) -> Region:
        """Make a region of new memory; see `Engine.allocate`."""
        rights = self._check_new(name, access, grant)
        size = number_of("bytes", "size", size, 1, 62)
        region = Region(self, name, rights, grant)
        allocator = next((d for d in self._drivers.values() if d.capabilities & CAP_ALLOC), None)
        if allocator is None:
            names = ", ".join(self._drivers)
            raise DriverError(f"none of the drivers ({names}) allocates memory; register a buffer of yours")
        _core.allocate(self._core, region, allocator, size, int(region.access))
        self._introduce(region, allocator)
        return self._enter(region)

    def register(self, name: str, buffer: Any, access: AccessLike, grant: Callable[[Any], AccessLike] | None) -> Region:
        """Make a region of existing memory; see `Engine.register`."""
        rights = self._check_new(name, access, grant)
        region = Region(self, name, rights, grant, borrowed=True)
        if isinstance(buffer, LocalMemory | LocalSlice):
            raise InvalidArgumentError(f"{buffer!r} is, or lies in, a region already; give peers that region")
        if _has_buffer(buffer):
            _core.borrow(self._core, region, buffer, int(region.access))
        else:
            self._borrow_object(region, buffer)
        self._introduce(region, None)
        return self._enter(region)

    def _check_new(self, name: str, access: AccessLike, grant: object) -> Access:
        require_region_name(name)
        if name in self._names:
            raise InvalidArgumentError(f"region {name!r} exists already; close it first, or choose another name")
        if grant is not None and not callable(grant):
            raise InvalidArgumentError(f"grant must be a function of a peer, not {shown(grant)}")
        rights = parse_access(access)
        if (
            rights
            and len(self._names) >= MAX_OFFERS
            and sum(bool(r.access) for r in self._names.values()) >= MAX_OFFERS
        ):
            raise BusyError(
                f"{MAX_OFFERS} regions are exported, which is the most; close some, or put several things into one region"
            )
        return rights

    def _borrow_object(self, region: Region, obj: Any) -> None:
        where = operand(obj, bool(region.access & Access.WRITE), "buffer must be a")
        owner: Any = where.owner
        if _has_buffer(owner):  # the buffer also says whether it may be written
            _core.borrow(self._core, region, owner, int(region.access))
        elif where.size == 0:
            raise RangeError("the buffer is empty; there is nothing to register")
        else:
            _core.borrow_address(self._core, region, owner, where.address, where.size, int(region.access), where.device)

    def _introduce(self, region: Region, allocator: Driver | None) -> None:
        """Register a region with every driver that can use it."""
        known = [] if allocator is None else [allocator]
        try:
            for driver in self._drivers.values():
                able = driver is not allocator and driver.capabilities & CAP_REGISTER
                if able and _core.register(self._core, region, driver):
                    known.append(driver)
            if not known:
                names = ", ".join(self._drivers)
                kind = "device memory" if region.device else "existing memory; use allocate"
                raise DriverError(f"none of the drivers ({names}) registers {kind}")
            for driver in known:
                if (pending := self._registration(region, driver)) is not None:
                    region._registrations[driver.name] = pending
        except BaseException:
            memory.retire(region)
            raise

    def _registration(self, region: Region, driver: Driver) -> asyncio.Future[DriverError | None] | None:
        """Return the outcome of a registration that is not done: the reason why it failed, or None once it is done."""
        outcome = self._core.loop.create_future()
        try:
            registration = memory.registration(region, driver)
        except HixlError as error:  # it has failed already, and is treated like a later failure
            outcome.set_result(_unusable(region, driver, error))
            return outcome
        if registration.done():
            return None
        registration.add_done_callback(partial(_registered, region, driver, outcome))
        return outcome

    def _enter(self, region: Region) -> Region:
        region._number = self._next_number
        self._next_number += 1
        self._names[region.name] = self._numbers[region._number] = region
        for peer in self._peers.up:
            peer._exports.offer(region)
        return region

    # -- withdrawing

    def must_be_here(self) -> None:
        """Return if the caller is in the engine's event loop, and raise the error otherwise."""
        self._host.check()

    def revoke(self, region: Region) -> None:
        """Refuse new work with a region, free its name, and withdraw the offer to peers.  Idempotent."""
        if self._numbers.get(region._number) is not region:
            return
        self._host.check_open()
        self._forget(region)
        for peer in self._peers.up:
            peer._exports.withdraw(region)

    def withdraw(self, region: Region) -> Closing:
        """Revoke a region, and wait for its users for as long as the engine's ``close_timeout``.  Idempotent."""
        in_flight.must_be_on_thread(self._core)
        return Closing(region, lambda: self._withdraw(region))

    def _withdraw(self, region: Region) -> asyncio.Task[None] | None:
        self.revoke(region)
        if self._core.closed:
            return None
        self._host.check()
        return self._host.spawn_ending(self._wait_for_users(region))

    async def _wait_for_users(self, region: Region) -> None:
        users = [peer for peer in self._peers if region in peer._exports]
        silent = [peer for peer in users if peer.state is PeerState.DOWN]
        released = region.released()
        # Users that are silent could not answer in time.
        hopeless = silent and region.pins == len(silent)
        await asyncio.wait([released], timeout=0 if hopeless else self._host.config.close_timeout)
        if not released.done():
            released.cancel()
            names = ", ".join(repr(peer.name) for peer in users) or "this process"
            log.warning("%r: its users (%s) did not release it; its memory stays pinned until they do", region, names)

    def close(self) -> None:
        """Retire all regions, because the engine ends."""
        for region in self.all():
            self._forget(region)

    def _forget(self, region: Region) -> None:
        del self._numbers[region._number], self._names[region.name]
        memory.retire(region)


def _registered(
    region: Region, driver: Driver, outcome: asyncio.Future[DriverError | None], registration: asyncio.Future[int]
) -> None:
    error = registration.exception()
    if isinstance(error, ClosedError):  # the engine has ended
        outcome.cancel()
    else:
        outcome.set_result(_unusable(region, driver, error) if isinstance(error, HixlError) else None)


def _unusable(region: Region, driver: Driver, error: HixlError) -> DriverError:
    failure = DriverError(f"{region!r} cannot be used by driver {driver.name!r}: {error}", native=error.native)
    log.warning("%s", failure)
    return failure


def _has_buffer(obj: object) -> bool:
    """Return True if an object offers a buffer, also one that cannot be described, such as that of a datetime64 array."""
    try:
        memoryview(obj).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    except (BufferError, ValueError):
        return True
    return True
