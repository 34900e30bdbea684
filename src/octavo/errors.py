"""What can go wrong, for whom.  Every message is one sentence that names the thing."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """A setting of the engine is out of range or contradicts another; ``field`` names it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(OctavoError):
    """A model file is missing, cut off, lies about itself, or is of a kind that Octavo doesn't run."""


class RequestError(OctavoError, ValueError):
    """A request's input is invalid; ``field`` names the parameter (HTTP 400 in the server)."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class DownloadError(OctavoError):
    """A model could not be fetched, or what came was not what was asked for."""


class EngineError(OctavoError):
    """The engine could not compute a request (its own error; neighbours go on)."""
