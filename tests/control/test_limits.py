"""The number of connections that one process, user or host may have."""

from __future__ import annotations

import os
import resource

import pytest

from hixl_async.control import ConnectionLimits, Credentials
from hixl_async.errors import ConnectError

from .sides import SECRET, HostFactory, elsewhere


class TestCounts:
    def test_processes_and_users(self) -> None:
        limits = ConnectionLimits(per_process=2, per_user=3)
        first = limits.admit(Credentials(10, 1000, 1000))
        limits.admit(Credentials(10, 1000, 1000))
        with pytest.raises(ConnectError, match="process 10 has 2 connections.*may have 2"):
            limits.admit(Credentials(10, 1000, 1000))
        limits.admit(Credentials(11, 1000, 1000))
        with pytest.raises(ConnectError, match="user 1000 has 3 connections"):
            limits.admit(Credentials(12, 1000, 1000))
        limits.admit(Credentials(13, 1001, 1000))
        first()
        first()
        limits.admit(Credentials(10, 1000, 1000))

    def test_processes_without_a_pid_here_by_their_user(self) -> None:
        limits = ConnectionLimits(per_process=1, per_user=2)
        for _ in range(2):
            limits.admit(Credentials(0, 1000, 1000))
        with pytest.raises(ConnectError, match="user 1000"):
            limits.admit(Credentials(0, 1000, 1000))

    def test_hosts(self) -> None:
        limits = ConnectionLimits(per_process=1, per_user=2)
        for _ in range(2):
            limits.admit("10.0.0.1")
        with pytest.raises(ConnectError, match=r"host 10.0.0.1 has 2 connections"):
            limits.admit("10.0.0.1")
        limits.admit("10.0.0.2")

    @pytest.mark.parametrize(
        ("descriptors", "per_process", "per_user"),
        [
            (1024, 85, 149),
            (4096, 341, 597),
            (1 << 20, 512, 4096),
            (resource.RLIM_INFINITY, 512, 4096),
            (3, 1, 1),
        ],
    )
    def test_follow_from_the_number_of_descriptors(
        self, monkeypatch: pytest.MonkeyPatch, descriptors: int, per_process: int, per_user: int
    ) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda what: (descriptors, descriptors))
        limits = ConnectionLimits()
        assert (limits.per_process, limits.per_user) == (per_process, per_user)


class TestConnections:
    async def test_of_one_process_are_limited(self, listen: HostFactory) -> None:
        host = await listen(limits=ConnectionLimits(per_process=2))
        _, theirs = await host.pair()
        await host.pair()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConnectError, match=f"process {os.getpid()} has 2 connections to this engine already"):
            await host.dial()
        assert "2 connections" in str(await host.refused.get())
        assert len(os.listdir("/proc/self/fd")) == before
        await theirs.aclose()
        await host.pair()

    async def test_of_one_host_are_limited(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        host = await listen(secret=SECRET, limits=ConnectionLimits(per_user=1))
        elsewhere(monkeypatch)
        _, theirs = await host.pair()
        with pytest.raises(ConnectError, match=r"host 127.0.0.1 has 1 connections"):
            await host.dial()
        theirs.abandon()
        await host.pair()
