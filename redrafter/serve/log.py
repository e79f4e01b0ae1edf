"""What a server says on stderr: a line each, for people or as JSON."""

import asyncio
import json
import logging
import re
import sys
import threading
import time
import traceback
import uuid
import warnings
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["JsonLines", "Logged", "Seldom", "TextLines", "escaped", "start_logging"]

_LOG = logging.getLogger(__name__)
LONGEST_ID = 100  # characters of a client's `X-Request-Id`
PAUSE = 5.0  # seconds in which the same warning is said once
_PLAIN = re.compile(r"[\w.,:/+-]+", re.ASCII)  # a value that needs no quotes


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, message, and the `facts` that it was logged with."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        facts = {"time": at, "level": record.levelname.lower(), "message": record.getMessage().strip()}
        facts |= getattr(record, "facts", {})
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)  # in ASCII: no terminal is told anything, and halves of characters pass


class TextLines(logging.Formatter):
    """A record as one line, and a traceback, set in, below it. Nothing that a client sent begins a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        lines = [f"redrafter: {level}{escaped(record.getMessage().strip())}"]
        if record.exc_info:
            lines += [f"  {escaped(line)}" for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


class Seldom(logging.Filter):
    """Lets the same warning of a library through once in a few seconds, however often clients cause it, and nothing of
    answers that were cut off because the server ends."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False
        if record.levelno != logging.WARNING or time.monotonic() - self._said.get(record.msg, -PAUSE) >= PAUSE:
            self._said[record.msg] = time.monotonic()
            return True
        return False


def start_logging(form: str, level: str) -> None:
    """Let all that is said, by this library, by those below and by the interpreter, be lines of one form on stderr.

    form: "text" or "json".
    level: the least that is said, "debug" to "error"; of other libraries, warnings at least.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    number, root, own = getattr(logging, level.upper()), logging.getLogger(), logging.getLogger("redrafter")
    root.handlers = own.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))
    own.setLevel(number)
    own.propagate = False
    served = logging.getLogger("uvicorn.error")
    served.setLevel(number if level == "debug" else max(number, logging.WARNING))
    served.addFilter(Seldom())

    def warn(message: Warning | str, *_: Any, **__: Any) -> None:
        _LOG.warning("%s", message)

    def crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _LOG.critical("%s", kind.__name__, exc_info=(kind, error, trace))

    def crash_in_thread(what: threading.ExceptHookArgs) -> None:
        trace = "".join(traceback.format_exception(what.exc_type, what.exc_value, what.exc_traceback))
        _LOG.critical("a thread ended: %s", what.exc_type.__name__, extra={"facts": {"exception": trace}})

    warnings.showwarning, sys.excepthook, threading.excepthook = warn, crash, crash_in_thread


def escaped(text: str) -> str:
    """Return a text in which everything that is not printed, such as new lines and colours, is written as escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Logged:
    """Around an application: what was asked for and what came of it. Routes may add to `scope["facts"]`. Every answer
    carries its request's id, the client's own where it sent one."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        own, address = _own_id(scope), str((scope.get("client") or ("unknown",))[0])
        method, path = scope["method"], scope["raw_path"].decode("latin-1")  # as it was sent, so without spaces
        status, began = 499, time.perf_counter()
        facts = scope["facts"] = {"id": own, "client": address}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", own.encode())]}
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception:
            status = 500  # which is answered further out
            raise
        finally:
            if method == "POST" or status >= 400:
                seconds = time.perf_counter() - began
                if facts["client"] != address:  # but a key's name
                    facts = {"id": own, "address": address} | facts
                told = "".join(f" {name}={_quoted(value)}" for name, value in facts.items())
                request = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
                line = "%s %s %d in %.3f s%s"
                _LOG.info(line, method, path, status, seconds, told, extra={"facts": request | facts})


def _own_id(scope: Scope) -> str:
    """Return the id that a client gave its request, of printable ASCII characters, or else a new one."""
    sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return "".join(each for each in sent if " " <= each <= "~")[:LONGEST_ID].strip() or uuid.uuid4().hex


def _quoted(value: object) -> str:
    """Return a value that cannot be taken for several."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
