"""Every error in OpenAI's shape: message, type, param, code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from octavo.errors import EngineError, OctavoError, RequestError

log = logging.getLogger("octavo.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(OctavoError):
    """An answer that is an error, with its HTTP status; ``retry_after`` in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error, whatever it is."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field, code=error.code)
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def unsupported(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field, code="unsupported_parameter")


def _where(location: tuple[Any, ...]) -> str:
    """``messages[0].content`` of pydantic's ("body", "messages", 0, "content")."""
    out = ""
    for part in location[1:] if location and location[0] in ("body", "query", "path", "header") else location:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out


def _invalid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, in words."""
    first = error.errors()[0]
    kind, where = first.get("type", ""), _where(tuple(first.get("loc", ())))
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is no valid JSON: {reason}", code="invalid_json")
    if not where:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    message = str(first.get("msg", "is invalid")).removeprefix("Value error, ")
    if kind == "missing":
        return ApiError(400, f"{where}: is required", param=where, code="missing_required_parameter")
    return ApiError(400, f"{where}: {message[:1].lower()}{message[1:]}", param=where, code="invalid_value")


def install(app: FastAPI) -> None:
    """Let every exception become an answer in OpenAI's shape."""

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid(error).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.method} {request.url.path} here"
        if error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def other(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(OctavoError, other)
    app.add_exception_handler(RequestError, other)
    app.add_exception_handler(Exception, other)
