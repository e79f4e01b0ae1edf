"""The messages between a router and a replica: a request goes one way, its answer comes back in parts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import Scope

__all__ = ["AnswerPart", "AnswerStart", "HttpCall", "ReplicaLostError"]

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class HttpCall:
    """A request of a client, on its way to a replica.

    Attributes:
        scope: What ASGI says of the request, as far as it can be sent.
        body: Its body.
        key: Requests with the same key go to the same replica; None for any replica.
    """

    scope: dict[str, Any]
    body: bytes
    key: str | None = None

    @classmethod
    def of(cls, scope: Scope, body: bytes, key: str | None, request_id: str) -> "HttpCall":
        """Return the call for a request of an ASGI server.

        Args:
            scope: The request's scope.
            body: Its body, as the replica shall get it.
            key: Key of the replica, or None.
            request_id: Id that the request has in the logs.
        """
        sent = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "server")
        replaced = (b"content-length", b"transfer-encoding", b"x-request-id")
        headers = [(name, value) for name, value in scope["headers"] if name not in replaced]
        headers += [(b"content-length", b"%d" % len(body)), (b"x-request-id", request_id.encode())]
        # By 2.3, an application is told of a client that has left by a message, and not by an error when it sends.
        asgi = {"version": "3.0", "spec_version": "2.3"}
        kept = {name: scope[name] for name in sent if name in scope}
        return cls(kept | {"asgi": asgi, "headers": headers, "client": scope.get("client")}, body, key)


class AnswerStart(NamedTuple):
    """Status and headers of an answer."""

    status: int
    headers: Headers


class AnswerPart(NamedTuple):
    """A part of an answer: bytes of its body and, in the first part, its start."""

    start: AnswerStart | None
    body: bytes


class ReplicaLostError(Exception):
    """The engine of a replica has ended: another replica can answer what this one has not."""
