"""One line per request, for people or as JSON."""

import json
import logging
import time
import uuid
from datetime import datetime, timezone

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["JsonLines", "Logged"]

_LOG = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, message, and the `facts` that it was logged with."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        facts = {"time": at, "level": record.levelname.lower(), "message": record.getMessage()}
        facts |= getattr(record, "facts", {})
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, ensure_ascii=False, default=str)


class Logged:
    """Around an application: what was asked for and what came of it. Routes may add to `scope["facts"]`. Every answer
    carries its request's id, the client's own where it sent one."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        own = dict(scope["headers"]).get(b"x-request-id", b"")[:100] or uuid.uuid4().hex.encode()
        method, path = scope["method"], scope["raw_path"].decode("latin-1")  # as it was sent, so on one line
        status, began = 499, time.perf_counter()
        scope["facts"] = {"id": own.decode("latin-1")}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", own)]}
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception:
            status = 500  # which is answered further out
            raise
        finally:
            if method == "POST" or status >= 400:
                seconds, facts = time.perf_counter() - began, scope["facts"]
                told = "".join(f" {name}={value}" for name, value in facts.items())
                request = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
                line = "%s %s %d in %.3f s%s"
                _LOG.info(line, method, path, status, seconds, told, extra={"facts": request | facts})
