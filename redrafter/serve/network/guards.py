"""Guards that every request passes before its route: the log, access control, and limits of bodies."""

from fastapi.middleware.cors import CORSMiddleware
from starlette.applications import Starlette

from redrafter.serve.log import RequestLog
from redrafter.serve.network.access import AccessControl, AccessPolicy, HeadAsGet
from redrafter.serve.network.bodies import BodyLimits

__all__ = ["add_guards"]


def add_guards(app: Starlette, policy: AccessPolicy, max_body_bytes: int) -> None:
    """Add the middleware that every request passes.

    Args:
        app: The application.
        policy: Which requests are accepted.
        max_body_bytes: Bytes that the body of a request may have.
    """
    # The last one runs first.
    app.add_middleware(BodyLimits, max_bytes=max_body_bytes)
    app.add_middleware(AccessControl, policy=policy)
    if policy.origins:
        headers = ["Authorization", "Content-Type", "X-Request-Id"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=policy.origins,
            allow_methods=["GET", "POST"],
            allow_headers=headers,
            expose_headers=headers[2:],
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestLog)
