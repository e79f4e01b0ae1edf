"""Check every request before its route: host, origin, key and content type, then the limits of its body.

Parsing and the validation of its result are single calls that block the event loop, even for `/health`. Their
duration depends on the number of values in a body rather than on its bytes, so both are limited before anything is
parsed, and large bodies are parsed one at a time, each followed by a pause as long as its parsing took.
"""

import asyncio
import re
import time
from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter.serve.config import ServeOptions
from redrafter.serve.extension import extensions, key_headers, protocol_at
from redrafter.serve.log import log_requests
from redrafter.serve.network.api_keys import OPERATOR_KEY_VARIABLE, ApiKeys
from redrafter.serve.protocol.fields import SMALL_BODY_BYTES
from redrafter.serve.protocol.requests import ApiError, error_body

# Paths that return only a status, for load balancers and similar probes.
HEALTH_PATHS = ("/health", "/v1/health/live", "/v1/health/ready")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
# Paths that need no key: those above, and static pages, which prompt for the key in the browser. Paths are compared
# only to open them, so a different spelling stays closed. The requirement of an operator's key is a property of the
# route, because the router may accept spellings that a comparison misses.
KEYLESS_PATHS = (*HEALTH_PATHS, "/", "/docs", "/version")
OWN_SITES = (b"same-origin", b"none")  # `Sec-Fetch-Site` of a request by a page of this server, or typed by the user
CHALLENGE = {"WWW-Authenticate": "Bearer"}
READING_METHODS = ("GET", "HEAD", "OPTIONS")  # methods without side effects
MAX_LARGE_BODIES_BYTES = 256 << 20  # total bytes of large bodies held at once
# Limits on structure: a body of N bytes may contain one of these per
BYTES_PER_COMMA = 8  # this many bytes: commas, about one per value
BYTES_PER_CONTAINER = 32  # [, { and colons: lists, objects and their fields take several times as long as a number
BYTES_PER_EXPONENT = 128  # exponents: numbers with an exponent take longest
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")  # normalises the start of every exponent to 0e
MAX_HEADERS = 100  # of a request
# An address in brackets or a name, each perhaps with a port, or an address of IPv6 alone
_HOST = re.compile(r"\[([\da-f:.]+)\](?::\d*)?|([^:\[\]\s]*)(?::\d*)?|([\da-f:.]+)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

Headers = dict[bytes, bytes]


@dataclass(frozen=True)
class AccessPolicy:
    """Policy that decides which requests a server accepts."""

    keys: ApiKeys = field(default_factory=ApiKeys)  # if empty, everybody may send requests
    hosts: tuple[str, ...] = ()  # allowed names in `Host`, `*.example.org` for subdomains; empty for any
    origins: tuple[str, ...] = ()  # allowed origins of other pages, such as `https://chat.example.org`; `*` for all
    open_metrics: bool = False  # whether `/metrics` needs no key
    operators: ApiKeys = field(default_factory=ApiKeys)  # if empty, nobody may change the engine

    @classmethod
    def from_options(cls, keys: ApiKeys, options: ServeOptions, operators: ApiKeys | None = None) -> "AccessPolicy":
        """Return the policy of a server.

        By default, a server on a loopback address accepts only its own names. This prevents DNS rebinding, where a web
        page reaches it under another name that resolves to this machine.
        """
        host, hosts = options.host, options.allowed_hosts
        own_names = (*LOOPBACK_HOSTS, host) if host in LOOPBACK_HOSTS or host.startswith("127.") else ()
        known = () if "*" in hosts else tuple(map(str.lower, hosts)) or own_names
        return cls(keys, known, options.allowed_origins, options.open_metrics, operators or ApiKeys())

    def knows_host(self, host: str) -> bool:
        """Return whether clients may call this server by a name."""
        return not self.hosts or any(host == x or (x.startswith("*.") and host.endswith(x[1:])) for x in self.hosts)


def error_answer(error: ApiError, path: str) -> JSONResponse:
    """Return the response for an error, in the format of the protocol that the path belongs to."""
    if (protocol := protocol_at(path)) is not None:
        status, body = protocol.format_error(error)
        return JSONResponse(body, status, error.headers)
    return JSONResponse(error_body(error.status, str(error), error.param, error.code), error.status, error.headers)


def add_guards(app: Starlette, policy: AccessPolicy, max_body_bytes: int) -> None:
    """Add the middleware that checks every request of an application. Bodies may have `max_body_bytes` bytes."""
    # Starlette runs the middleware added last first: logging sees every request, and keys are checked before bodies are
    # read.
    app.add_middleware(BodyLimits, max_bytes=max_body_bytes)
    app.add_middleware(access_control, policy=policy)
    if policy.origins:
        own = "Authorization", "Content-Type", "X-Request-Id"
        others = (name for extension in extensions() for name in extension.cors_headers)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=policy.origins,
            allow_methods=["GET", "POST"],
            allow_headers=[*own, *key_headers(), *others],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(head_as_get)
    app.add_middleware(log_requests)


def access_control(app: ASGIApp, policy: AccessPolicy) -> ASGIApp:
    """Wrap an application to reject requests that a policy does not accept."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                check_access(scope, policy)
        except ApiError as error:
            return await error_answer(error, scope["path"])(scope, receive, send)
        await app(scope, receive, send)

    return answer


def check_access(scope: Scope, policy: AccessPolicy) -> None:
    """Raise `ApiError` for a request that a policy does not accept.

    Sets `scope["facts"]["client"]` to the name of the client's key, `scope["admitted"]` to whether the client has full
    access, and the values that `JsonRoute` and `OperatorRoute` check: `scope["opened"]` and `scope["policy"]`.
    """
    headers, path = dict(scope["headers"]), scope["path"]
    if len(scope["headers"]) > MAX_HEADERS:
        raise ApiError(431, f"the request has {len(scope['headers'])} headers: at most {MAX_HEADERS} are read")
    if (control := _CONTROL.search(path)) is not None:  # `$` of a route's pattern would match before a final newline
        raise ApiError(400, f"the path contains the control character {control.group()!r}: leave it out")
    check_framing(scope["headers"])
    # Another name may be DNS rebinding by a page in a browser on this network.
    host = host_of(scope["headers"])
    if host is not None and path not in HEALTH_PATHS and not policy.knows_host(host):
        raise ApiError(403, f"{host!r} is not a name of this server; --allowed-hosts adds names")
    if scope["method"] not in READING_METHODS and _is_foreign(headers):  # browsers send such requests for any page
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin not in policy.origins and "*" not in policy.origins:
            what = f"pages of {origin or 'another site'} may not ask here; --allowed-origins says which may"
            raise ApiError(403, what)
    sent = _sent_keys(headers)
    name = policy.keys.client(*sent)
    if name is not None:
        scope["facts"]["client"] = name
    scope["policy"], scope["admitted"] = policy, name is not None or not policy.keys
    scope["opened"] = scope["admitted"] or path in KEYLESS_PATHS or (policy.open_metrics and path == "/metrics")
    if not scope["opened"] and policy.operators.client(*sent) is None:
        raise _missing_key()
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    is_json = kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
    if scope["method"] == "POST" and not is_json:
        # Browsers send other types across sites without a preflight request, so a page could post without permission.
        by_browser = b"origin" in headers or b"sec-fetch-site" in headers
        if by_browser or kind not in (b"", b"application/x-www-form-urlencoded"):  # `curl -d` defaults to this type
            raise ApiError(415, "the body must be JSON, sent with the header Content-Type: application/json")
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*others, (b"content-type", b"application/json")]


def check_operator(scope: Scope) -> str:
    """Return the name of the operator's key in the headers of a request, or raise `ApiError`."""
    sent, policy = _sent_keys(dict(scope["headers"])), scope["policy"]
    if not policy.operators:
        how = f"start it with --operator-key KEY, or {OPERATOR_KEY_VARIABLE} in its environment"
        raise ApiError(404, f"this server's engine is not changed while it runs: {how}", code="unsupported_endpoint")
    name: str | None = policy.operators.client(*sent)
    if name is not None:
        return name
    if policy.keys and policy.keys.client(*sent) is not None:
        raise ApiError(403, "this needs an operator's key: --operator-key of the server", None, "invalid_api_key")
    raise ApiError(401, "the operator's key is missing or wrong", None, "invalid_api_key", CHALLENGE)


def _sent_keys(headers: Headers) -> list[bytes]:
    """Return the value of `Authorization`, and then those of extensions' headers for keys; empty ones are absent."""
    names = ("authorization", *(name.lower() for name in key_headers()))
    return [headers.get(name.encode(), b"") for name in names]


def _missing_key() -> ApiError:
    return ApiError(401, "the API key is missing or wrong", None, "invalid_api_key", CHALLENGE)


def head_as_get(app: ASGIApp) -> ASGIApp:
    """Wrap an application to answer HEAD like GET; the connection drops the body."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the connection must still see HEAD to drop the body
        await app(scope, receive, send)

    return answer


def check_framing(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise `ApiError` for headers by which a proxy and this server could find different ends of a body.

    Such requests can be smuggled past a proxy (RFC 9112, 6.1). The connection closes, as its next bytes are uncertain.
    """
    coding, names = b", ".join(value for name, value in headers if name == b"transfer-encoding"), dict(headers)
    what = None
    if coding and b"content-length" in names:  # this server's parser refuses them itself, unlike Ray's
        what = "the request has Content-Length and Transfer-Encoding: send one of them"
    elif coding and coding.strip().lower() != b"chunked":
        what = f"the body has the Transfer-Encoding {coding.decode('latin-1')!r}: only chunked is read"
    elif (coding or names.get(b"content-length", b"0") != b"0") and b"upgrade" in names:
        # httptools does not read a body that follows an offer of another protocol.
        what = "the request has a body and offers another protocol: leave out Upgrade (in Java: Version.HTTP_1_1)"
    if what is not None:
        raise ApiError(400, what, headers={"Connection": "close"})


def host_of(headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return the name or address in the `Host` header, without its port and brackets, or None without the header.

    Raises `ApiError` for several such headers, and for one that is not a name or an address.
    """
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise ApiError(400, f"the request has {len(hosts)} Host headers: send one")
    match = _HOST.fullmatch(hosts[0]) if hosts else None
    if hosts and match is None:
        raise ApiError(400, f"the Host header {hosts[0]!r} is not a name or an address")
    return None if match is None else next(name for name in match.groups() if name is not None)


def _is_foreign(headers: Headers) -> bool:
    # Pages cannot set this header; older browsers do not send it, so `Origin` is compared with `Host` for them.
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in OWN_SITES
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        host = urlsplit(origin.lower()).netloc or None  # an origin such as `null` has none
    except ValueError:
        host = None
    return host != headers.get(b"host", b"").lower()


class BodyLimits:
    """ASGI middleware that refuses bodies that are too long or hold too many values."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app, self.max_bytes = app, max_bytes
        self._held_bytes = 0  # of large bodies
        self._turn = asyncio.Lock()  # of large bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request under the limits."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        too_long = ApiError(413, f"the body is longer than {self.max_bytes} bytes")
        # A declared size is refused before any of the body is read; chunked bodies are counted as they come.
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self.max_bytes:
            return await error_answer(too_long, scope["path"])(scope, receive, send)
        read = held = 0

        async def receive_some() -> Message:
            nonlocal read, held
            message = await receive()
            size = len(message.get("body", b""))
            read += size
            if read > self.max_bytes:
                raise too_long
            if read > SMALL_BODY_BYTES:
                self.hold(size)
                held += size
            return message

        def release() -> None:
            nonlocal held
            self.hold(-held)
            held = 0

        async def answer(message: Message) -> None:
            release()  # only now: a request that waits for its turn, as with images, holds its body
            await send(message)

        scope["parse"] = self.parse
        try:
            await self.app(scope, receive_some, answer)
        finally:
            release()

    def hold(self, size: int) -> None:
        """Count held bytes of a large body, or reject it if too many are held; a negative size releases bytes."""
        if size > 0 and self._held_bytes + size > MAX_LARGE_BODIES_BYTES:
            raise ApiError(503, "too many large bodies at once", headers={"Retry-After": "1"})
        self._held_bytes += size

    async def parse(self, body: bytes) -> Any:
        """Parse a body and return its value; large bodies are parsed one at a time."""
        if len(body) <= SMALL_BODY_BYTES:
            return _parse_json(body)
        # Parsing holds the GIL, so large bodies are parsed one at a time, with pauses for other requests.
        await self._turn.acquire()
        began, loop = time.monotonic(), asyncio.get_running_loop()
        try:
            check_structure(body, self.max_bytes)
            return _parse_json(body)
        finally:
            # Validation of the fields follows synchronously; a scheduled call runs after it, so the pause includes it.
            loop.call_soon(lambda: loop.call_later(time.monotonic() - began, self._turn.release))


class JsonRequest(Request):
    """A request whose body is parsed under `BodyLimits`."""

    async def json(self) -> Any:
        """Read and parse the body, and return its value."""
        if not hasattr(self, "_json"):
            body = await self.body()
            self.scope["facts"]["body_bytes"] = len(body)
            self._json = await self.scope["parse"](body)
            del body
            self._body = b""  # free it, since it may be large and a stream may last
        return self._json


def check_structure(body: bytes, max_bytes: int) -> None:
    """Raise `ApiError` for a body with too many values relative to `max_bytes`, without parsing it.

    Characters within strings count too, since finding the strings would cost more than it saves.
    """
    # Each entry becomes a Python object of many times its size, so entries are bounded before parsing.
    if (count := body.count(b",")) > max_bytes // BYTES_PER_COMMA:
        raise ApiError(413, f"the body holds {count} commas; at most {max_bytes // BYTES_PER_COMMA}")
    if (count := sum(map(body.count, (b"[", b"{", b":")))) > max_bytes // BYTES_PER_CONTAINER:
        raise ApiError(413, f"the body holds {count} of [, {{ and :; at most {max_bytes // BYTES_PER_CONTAINER}")
    if (count := body.translate(_ALIKE).count(b"0e")) > max_bytes // BYTES_PER_EXPONENT:
        raise ApiError(413, f"the body holds {count} numbers with exponents; at most {max_bytes // BYTES_PER_EXPONENT}")


def _parse_json(body: bytes) -> Any:
    """Parse a body. Lone surrogates and numbers such as NaN are invalid, and so is nesting of more than 200 levels."""
    try:
        return from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


class JsonRoute(APIRoute):
    """A route for clients, whose bodies are parsed under `BodyLimits`."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the caller before the body is read, then handle the request."""
        self.check_caller(scope)
        await super().handle(scope, receive, send)

    def check_caller(self, scope: Scope) -> None:
        """Raise `ApiError` for a caller with only an operator's key, unless the path needs no key."""
        if not scope["opened"]:
            raise _missing_key()

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return a handler that parses bodies under `BodyLimits`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


class OperatorRoute(JsonRoute):
    """A route that changes the engine for all clients. Only operators may call it; their keys open nothing else."""

    def check_caller(self, scope: Scope) -> None:
        """Raise `ApiError` unless the caller is an operator, and log the name of the operator's key."""
        scope["facts"]["client"] = check_operator(scope)
