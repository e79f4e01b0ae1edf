"""Who may ask, and from where: checked before anything of a request's body is read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.protocol.requests import error_body

__all__ = ["Admission", "Guard", "HeadAsGet", "Refusal", "error_answer", "host_of"]

OPEN = ("/health", "/v1/health/live", "/v1/health/ready")  # tell no more than a status, and are asked for by machines
LOOPBACK = ("localhost", "127.0.0.1", "::1")
UNLOCKED = (*OPEN, "/", "/docs", "/version")  # pages, which hold nothing but themselves and ask for the key, too
SAME = (b"same-origin", b"none")  # what a browser says of a request by a page of ours, or typed by its user
READING = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


@dataclass(frozen=True)
class Admission:
    """What a server lets in.

    keys: the API keys; without any, everybody may ask.
    hosts: names that clients may know this server by, `*.example.org` for all below one; empty for any.
    origins: pages elsewhere that may ask, such as `https://chat.example.org`; `*` for all.
    open_metrics: whether `/metrics` needs no key.
    """

    keys: ApiKeys = field(default_factory=ApiKeys)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    open_metrics: bool = False

    @classmethod
    def of(
        cls, keys: ApiKeys, host: str, hosts: tuple[str, ...], origins: tuple[str, ...], open_metrics: bool
    ) -> "Admission":
        """Return what a server that listens on `host` lets in: on this machine alone, no name but its own ones, so
        that no web page gets at it under a name that leads here."""
        own = (*LOOPBACK, host) if host in LOOPBACK or host.startswith("127.") else ()
        return cls(keys, () if "*" in hosts else tuple(map(str.lower, hosts)) or own, origins, open_metrics)

    def knows_host(self, host: str) -> bool:
        """Whether clients may call this server so."""
        return not self.hosts or any(
            host == each or (each.startswith("*.") and host.endswith(each[1:])) for each in self.hosts
        )

    def needs_key(self, path: str) -> bool:
        """Whether a path is closed to those who have no key, where there are keys."""
        return bool(self.keys) and path not in UNLOCKED and not (self.open_metrics and path == "/metrics")


class Refusal(HTTPException):
    """A request that is turned away. The message is for its client."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(status, message, headers)
        self.code = code


class Guard:
    """Around an application: turns away what `Admission` does not let in. Notes whose key was sent, as the client among
    the facts of a log, and as `scope["admitted"]` whether everything may be shown."""

    def __init__(self, app: ASGIApp, admission: Admission):
        self.app, self.admission = app, admission
        self._checks: tuple[Callable[[Scope, dict[bytes, bytes]], None], ...] = (
            self._check_host,
            self._check_origin,
            self._check_key,
            self._check_type,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        try:
            for check in self._checks:
                check(scope, headers)
        except Refusal as refusal:
            return await error_answer(refusal)(scope, receive, send)
        await self.app(scope, receive, send)

    def _check_host(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if b"host" not in headers or scope["path"] in OPEN:
            return
        host = host_of(headers[b"host"].decode("latin-1"))
        if not self.admission.knows_host(host):
            raise Refusal(403, f"this server is not called {host!r}; --allowed-hosts says what it is called")

    def _check_origin(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """A browser sends some requests for any page, wherever that page is from."""
        if scope["method"] in READING or not _is_foreign(headers):
            return
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin not in self.admission.origins and "*" not in self.admission.origins:
            raise Refusal(
                403, f"pages of {origin or 'another site'} may not ask here; --allowed-origins says which may"
            )

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        scope["admitted"] = not self.admission.keys
        if scope["admitted"]:
            return
        name = self.admission.keys.client(headers.get(b"authorization", b""))
        if name is not None:
            scope["facts"]["client"], scope["admitted"] = name, True
        elif self.admission.needs_key(scope["path"]):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, "the API key is missing or wrong", "invalid_api_key", challenge)

    def _check_type(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """A body must be called JSON, but for those of programs: `curl -d` calls everything a form."""
        if scope["method"] != "POST":
            return
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
            return
        by_browser = b"origin" in headers or b"sec-fetch-site" in headers
        if by_browser or kind not in (b"", b"application/x-www-form-urlencoded"):
            raise Refusal(415, "the body must be JSON, sent with the header Content-Type: application/json")
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*others, (b"content-type", b"application/json")]


class HeadAsGet:
    """Around an application: answers HEAD as GET, whose body the connection leaves out."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the connection still knows that it was HEAD
        await self.app(scope, receive, send)


def host_of(header: str) -> str:
    """Return the name or address in a `Host` header, without its port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if header.count(":") == 1 else header.lower()


def _is_foreign(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser sends this for a page of another server."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in SAME
    origin = headers.get(b"origin")
    return origin is not None and _place(origin) != headers.get(b"host", b"").lower()


def _place(origin: bytes) -> bytes | None:
    """Return the host and port of an origin as a `Host` header has them; None where it has none, as `null` has not."""
    try:
        return urlsplit(origin.lower()).netloc or None
    except ValueError:
        return None


def error_answer(refusal: Refusal) -> JSONResponse:
    """Return a refusal as OpenAI's clients expect it."""
    body = error_body(refusal.status_code, refusal.detail, None, refusal.code)
    return JSONResponse(body, refusal.status_code, refusal.headers)
