"""What a device is asked to do: to know a mapping of the host, and to copy between it and a tensor of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["copy", "pin"]


def pin(tensor: Any, address: int, nbytes: int) -> Callable[[], object] | None:
    """Makes host memory known to the device of `tensor`; CUDA would copy it by way of a buffer of its own, and wait for that.

    :return: what undoes it; None where the device needs no telling, or cannot be told.
    """
    if tensor.device.type != "cuda":
        return None
    # https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html, cudaHostRegister
    runtime = _torch().cuda.cudart()
    if int(runtime.cudaHostRegister(address, nbytes, 0)) != 0:
        return None
    return lambda: runtime.cudaHostUnregister(address)


def copy(tensor: Any, address: int, nbytes: int, to_device: bool) -> Any:
    """Begins to copy a whole tensor, on the stream that is current for its device.

    :return: an event of the device, recorded behind the copy.
    """
    import ctypes  # torch has brought it

    torch = _torch()
    host = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
    flat = tensor.reshape(-1).view(torch.uint8)
    device = torch.get_device_module(tensor.device)
    with device.device(tensor.device):
        if to_device:
            flat.copy_(host, non_blocking=True)
        else:
            host.copy_(flat, non_blocking=True)
        event = device.Event()
        event.record(device.current_stream(tensor.device))
    return event


def _torch() -> Any:
    """The caller brought it: the tensor is one of its own."""
    return sys.modules["torch"]
