"""The errors of the API, in OpenAI's form."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error for the client.

    :param status: the HTTP status.
    :param kind: the `type` in OpenAI's form.
    :param code: a stable word for the reason.
    :param param: the field of the request that is wrong.
    :param retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def full(message: str) -> ApiError:
    """Return the error of a request for which there is no room now."""
    return ApiError(message, status=429, kind="rate_limit_error", code="pool_full", retry_after=1)


def lost(message: str) -> ApiError:
    """Return the error of a request whose process has died."""
    return ApiError(message, status=503, kind="service_unavailable_error", code="process_lost", retry_after=1)


def stopping() -> ApiError:
    """Return the error of a request that has not ended when the server is stopped."""
    return ApiError("the server is being stopped", status=503, kind="service_unavailable_error", code="server_stopping")


def failed(message: str) -> ApiError:
    """Return the error of a request that failed in another way."""
    return ApiError(message, status=500, kind="server_error", code="internal_error")
