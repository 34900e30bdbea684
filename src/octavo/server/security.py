"""Who may call: keys, the Host header, and web pages from elsewhere."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from octavo.server.errors import ApiError
from octavo.server.settings import ServerSettings

# What needs no key: whether the server is alive, and the map's empty page (its data needs one).
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/", "/favicon.ico"})
OPEN_FOLDER = "/map/"


class Guard:
    """Owns: digests of the keys, and the names that this server answers to.

    Promises: a key is compared in constant time with every key there is; a page on the web cannot drive a server on
    its reader's machine, neither by a name of its own that leads here (the Host header) nor by sending to its address
    (the Origin header).
    """

    def __init__(self, settings: ServerSettings, keys: Mapping[str, str]) -> None:
        self._keys = [(hashlib.sha256(key.encode()).digest(), name) for key, name in keys.items()]
        self._hosts = {name.lower().rstrip(".") for name in (*settings.allowed_hosts, settings.host)}
        self._any = "*" in settings.allowed_hosts
        self._origins = {origin.rstrip("/").lower() for origin in settings.cors_origins}

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> str:
        """The name of the key's owner, "" without keys.  Raises ApiError."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self._any and not self._own(host):
            message = f"the host {host!r} is not one of this server's; --allowed-host adds one"
            raise ApiError(403, message, code="host_not_allowed")
        origin = headers.get(b"origin")
        if origin is not None and not self._welcome(origin.decode("latin-1").lower(), host):
            message = "pages of this origin may not call this server; --cors-origin adds one"
            raise ApiError(403, message, code="origin_not_allowed")
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or method == "OPTIONS":
            return ""
        return self._owner(headers.get(b"authorization", b""))

    def _owner(self, header: bytes) -> str:
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = ""
        for known, name in self._keys:  # all of them, found or not
            if hmac.compare_digest(known, digest):
                found = name
        if not found or scheme.lower() != b"bearer":
            headers = {"WWW-Authenticate": "Bearer"}
            message = "a valid key is needed, as in `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        return found

    def _own(self, host: str) -> bool:
        """Whether a Host header names this server.  An address always does: no name can be made to lead here."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _welcome(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return origin in (f"http://{host}", f"https://{host}")
