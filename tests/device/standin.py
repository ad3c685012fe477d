"""A device called ``npu`` for tests without one: tensors say that they lie there, and their bytes lie in the host's memory.

It takes the place for private devices in torch, as torch_npu does, by a function that torch calls experimental; so the tests
that use it name the version of torch that they know.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class Event:
    """A device event: `record` puts it behind the work of a stream, which `finish` ends."""

    def __init__(self) -> None:
        self.npu_event = 0  # of torch_npu's events: the address of AscendCL's, made when it is first recorded
        self._done = True
        self.asked = 0

    def record(self) -> None:
        self.npu_event, self._done = 0xACE, False

    def finish(self) -> None:
        self._done = True

    def query(self) -> bool:
        self.asked += 1
        return self._done


class _Module(types.ModuleType):
    Event = Event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[Any]:
        return []


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class Tensor(torch.Tensor):
    """A tensor on the device; `host` has its bytes."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Tensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device="npu:0"
        )
        made.host = host
        return made

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def detach(self) -> Tensor:
        return Tensor(self.host)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.host[index])

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, arguments: Any = (), words: Any = None) -> Any:
        raise NotImplementedError(f"nothing is computed here: {function}")


def install() -> None:
    """Register the device, once in a process and for good."""
    if not hasattr(torch, "npu"):
        _setup_privateuseone_for_python_backend(
            rename="npu", backend_module=_Module("torch.npu"), hook=_Hook(), device_guard=_Guard()
        )
