"""The operations of torch devices: registering a mapping of the host, and copying between it and a tensor on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["copy", "pin"]


def pin(tensor: Any, address: int, nbytes: int) -> Callable[[], object] | None:
    """Register host memory with the device of `tensor`; otherwise CUDA would copy through a staging buffer, and block.

    :return: a function that undoes it; None if the device needs no registration, or refuses it.
    """
    if tensor.device.type != "cuda":
        return None
    # https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html, cudaHostRegister
    runtime = _torch().cuda.cudart()
    if int(runtime.cudaHostRegister(address, nbytes, 0)) != 0:
        return None
    return lambda: runtime.cudaHostUnregister(address)


def copy(tensor: Any, address: int, nbytes: int, to_device: bool) -> Any:
    """Begin to copy a whole tensor, on the current stream of its device.

    It raises only if no copy was queued.

    :return: an event of the device after the copy, or another object whose ``query()`` returns True once the copy has ended.
    """
    import ctypes  # torch has imported it already

    torch = _torch()
    host = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
    flat = tensor.reshape(-1).view(torch.uint8)
    device = torch.get_device_module(tensor.device)
    with device.device(tensor.device):
        stream, event = device.current_stream(tensor.device), device.Event()
        if to_device:
            flat.copy_(host, non_blocking=True)
        else:
            host.copy_(flat, non_blocking=True)
        try:
            event.record(stream)
        except BaseException as error:  # the copy is queued, and must end before its memory is used again
            event = _Unrecorded(stream, error)
    return event


class _Unrecorded:
    """A substitute for an event that could not be recorded after a copy: once the stream is idle, the copy has failed."""

    def __init__(self, stream: Any, error: BaseException) -> None:
        self._stream = stream
        self._error = error

    def query(self) -> bool:
        """Return False while the stream is busy.

        :raises BaseException: once the stream is idle, the reason why the event was not recorded.
        """
        if not self._stream.query():
            return False
        raise self._error


def _torch() -> Any:
    """Return the torch module, which the caller has imported, because the tensor is one of its own."""
    return sys.modules["torch"]
