"""Access control: host, origin, API key and content type of a request, checked before its body is read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.protocol.requests import error_body

__all__ = ["HEALTH_PATHS", "AccessControl", "AccessPolicy", "HeadAsGet", "Refusal", "error_answer", "host_of"]

# Answer with no more than a status, for load balancers and the like.
HEALTH_PATHS = ("/health", "/v1/health/live", "/v1/health/ready")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
KEYLESS_PATHS = (*HEALTH_PATHS, "/", "/docs", "/version")  # and static pages, which ask for the key themselves
OWN_SITES = (b"same-origin", b"none")  # `Sec-Fetch-Site` of a request by a page of this server, or typed by the user
READING_METHODS = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


@dataclass(frozen=True)
class AccessPolicy:
    """Which requests a server accepts.

    Attributes:
        keys: API keys; without any, everybody may send requests.
        hosts: Names in the `Host` header that are accepted, `*.example.org` for all below one; empty for any.
        origins: Origins of other servers' pages that may send requests, such as `https://chat.example.org`; `*` for
            all.
        open_metrics: Whether `/metrics` needs no key.
    """

    keys: ApiKeys = field(default_factory=ApiKeys)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    open_metrics: bool = False

    @classmethod
    def of(
        cls, keys: ApiKeys, host: str, hosts: tuple[str, ...], origins: tuple[str, ...], open_metrics: bool
    ) -> "AccessPolicy":
        """Return the policy of a server that listens on `host`.

        On a loopback address, only its own names are accepted by default, so that no web page reaches it under another
        name that resolves to this machine.
        """
        own_names = (*LOOPBACK_HOSTS, host) if host in LOOPBACK_HOSTS or host.startswith("127.") else ()
        return cls(keys, () if "*" in hosts else tuple(map(str.lower, hosts)) or own_names, origins, open_metrics)

    def knows_host(self, host: str) -> bool:
        """Return whether clients may call this server by a name."""
        return not self.hosts or any(
            host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in self.hosts
        )

    def needs_key(self, path: str) -> bool:
        """Return whether requests for a path need a key of this server."""
        return bool(self.keys) and path not in KEYLESS_PATHS and not (self.open_metrics and path == "/metrics")


class Refusal(HTTPException):
    """Refusal of a request, with a message for its client."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(status, message, headers)
        self.code = code


class AccessControl:
    """ASGI middleware that refuses what an `AccessPolicy` does not accept.

    It sets `scope["facts"]["client"]` to the name of the key that was sent, and `scope["admitted"]` to whether the
    client may see everything.
    """

    def __init__(self, app: ASGIApp, policy: AccessPolicy):
        self.app, self.policy = app, policy
        self._checks: tuple[Callable[[Scope, dict[bytes, bytes]], None], ...] = (
            self._check_host,
            self._check_origin,
            self._check_key,
            self._check_type,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and serve it or answer with the refusal."""
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
        if b"host" not in headers or scope["path"] in HEALTH_PATHS:
            return
        host = host_of(headers[b"host"].decode("latin-1"))
        if not self.policy.knows_host(host):
            raise Refusal(403, f"this server is not called {host!r}; --allowed-hosts says what it is called")

    def _check_origin(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse requests of other servers' pages, which a browser sends for any page."""
        if scope["method"] in READING_METHODS or not _is_foreign(headers):
            return
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin not in self.policy.origins and "*" not in self.policy.origins:
            raise Refusal(
                403, f"pages of {origin or 'another site'} may not ask here; --allowed-origins says which may"
            )

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        scope["admitted"] = not self.policy.keys
        if scope["admitted"]:
            return
        name = self.policy.keys.client(headers.get(b"authorization", b""))
        if name is not None:
            scope["facts"]["client"], scope["admitted"] = name, True
        elif self.policy.needs_key(scope["path"]):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, "the API key is missing or wrong", "invalid_api_key", challenge)

    def _check_type(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse bodies of another type than JSON, but accept what `curl -d` sends, which calls everything a form."""
        if scope["method"] != "POST":
            return
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
            return
        by_browser = b"origin" in headers or b"sec-fetch-site" in headers
        if by_browser or kind not in (b"", b"application/x-www-form-urlencoded"):
            raise Refusal(415, "the body must be JSON, sent with the header Content-Type: application/json")
        headers_kept = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*headers_kept, (b"content-type", b"application/json")]


class HeadAsGet:
    """ASGI middleware that answers HEAD as GET; the connection leaves the body out."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, HEAD as GET."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the connection still knows that it was HEAD
        await self.app(scope, receive, send)


def host_of(header: str) -> str:
    """Return the name or address in a `Host` header, without its port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if header.count(":") == 1 else header.lower()


def _is_foreign(headers: dict[bytes, bytes]) -> bool:
    """Return whether a browser sends a request for a page of another server."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in OWN_SITES
    origin = headers.get(b"origin")
    return origin is not None and _host_of_origin(origin) != headers.get(b"host", b"").lower()


def _host_of_origin(origin: bytes) -> bytes | None:
    """Return the host and port of an origin as in a `Host` header; None for an origin without any, such as `null`."""
    try:
        return urlsplit(origin.lower()).netloc or None
    except ValueError:
        return None


def error_answer(refusal: Refusal) -> JSONResponse:
    """Return the answer with a refusal, in the shape of OpenAI's errors."""
    body = error_body(refusal.status_code, refusal.detail, None, refusal.code)
    return JSONResponse(body, refusal.status_code, refusal.headers)
