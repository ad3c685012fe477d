"""Losses: P or D is gone, or a transfer between them failed, and the request is worth another try."""

from __future__ import annotations

import hixl_async as hx

LOSSES = (hx.PeerDownError, hx.ConnectError, hx.TransferError)


def is_loss(error: Exception) -> bool:
    """Return True if an error is one of the `LOSSES`, here or in the process that reports it."""
    if isinstance(error, hx.RemoteError):
        return issubclass(getattr(hx, error.remote_class), LOSSES)
    return isinstance(error, LOSSES)


def cause(group: ExceptionGroup[Exception]) -> Exception:
    """Return one error of a group: a loss that explains the others, if there is one."""
    error: Exception = group.subgroup(LOSSES) or group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
