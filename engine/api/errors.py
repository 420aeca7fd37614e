"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from engine.async_engine import ClientGone, EngineDead, RequestRefused
from engine.scheduler import QueueFull


class APIError(Exception):
    """A refusal with its HTTP status; `param` names the request's field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The error as an HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)


def bad_field(param: str, message: str) -> APIError:
    """400 for one field; the message starts with its name."""
    return APIError(400, f"{param}: {message}", param=param)


def as_api_error(error: Exception) -> APIError:
    """What an exception of the engine means to a client."""
    match error:
        case APIError():
            return error
        case QueueFull():
            return APIError(503, str(error), kind="overloaded_error", code="queue_full", headers={"Retry-After": "1"})
        case EngineDead():
            return APIError(503, str(error), kind="server_error", code="engine_dead", headers={"Retry-After": "5"})
        case ClientGone():
            return APIError(499, "the client closed the connection", code="client_closed_request")
        case HTTPException():
            return APIError(error.status_code, error.detail, headers=error.headers)
        case RequestRefused():
            return APIError(400, str(error))
        case _:
            return APIError(500, "internal error; the engine's log says more", kind="server_error")
