"""Log to stderr: one line per record, as text or JSON, and one line per request."""

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

_LOG = logging.getLogger(__name__)
MAX_ID_CHARACTERS = 100  # of a client's `X-Request-Id`; the rest is dropped
_UNQUOTED = re.compile(r"[\w.,:/+-]+", re.ASCII)  # a value that needs no quotes


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, message, and the `facts` logged with it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line."""
        timestamp = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        facts = {"time": timestamp, "level": record.levelname.lower(), "message": record.getMessage().strip()}
        facts |= getattr(record, "facts", {})
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)  # ASCII: no terminal control codes, and lone surrogates are escaped


class TextLines(logging.Formatter):
    """Formats a record as one line with an indented traceback below. Text from a client never begins a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line, and one for each line of its traceback."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        lines = [f"redrafter: {level}{escaped(record.getMessage().strip())}"]
        if record.exc_info:
            lines += [f"  {escaped(line)}" for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


def start_logging(form: str, level: str) -> None:
    """Log the records of this library and others, warnings and uncaught errors as lines on stderr, as "text" or "json".

    `level` is the lowest level to log, "debug" to "error"; for other libraries it is at least "warning".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    threshold = getattr(logging, level.upper())
    root, ours = logging.getLogger(), logging.getLogger("redrafter")
    # Libraries' warnings take the same form, so that log collectors can parse every line.
    root.handlers = ours.handlers = [handler]
    root.setLevel(max(threshold, logging.WARNING))
    ours.setLevel(threshold)
    ours.propagate = False
    http = logging.getLogger("uvicorn.error")
    http.setLevel(threshold if level == "debug" else max(threshold, logging.WARNING))
    # Answers that a shutdown cuts off are no errors.
    http.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)))

    def log_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        _LOG.warning("%s", message)

    def log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _LOG.critical("%s", kind.__name__, exc_info=(kind, error, trace))

    def log_crash_in_thread(crash: threading.ExceptHookArgs) -> None:
        trace = "".join(traceback.format_exception(crash.exc_type, crash.exc_value, crash.exc_traceback))
        _LOG.critical("a thread ended: %s", crash.exc_type.__name__, extra={"facts": {"exception": trace}})

    warnings.showwarning, sys.excepthook, threading.excepthook = log_warning, log_crash, log_crash_in_thread


def escaped(text: str) -> str:
    """Return a text with unprintable characters, such as line breaks and colours, written as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def log_requests(app: ASGIApp) -> ASGIApp:
    """Return an application that logs each request and its answer.

    Routes may add to the logged facts in `scope["facts"]`. Every answer has a request id: the client's `X-Request-Id`
    if it sent one.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        # The identifier is echoed in a header and the log, so it must not contain control characters.
        sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        printable = "".join(char for char in sent if " " <= char <= "~")
        request_id = printable[:MAX_ID_CHARACTERS].strip() or uuid.uuid4().hex
        address = str((scope.get("client") or ("unknown",))[0])
        method, path = scope["method"], scope["raw_path"].decode("latin-1")  # still percent-encoded, so without spaces
        # If the client disconnects there is no answer, hence no status but this one.
        status, began = 499, time.perf_counter()
        facts = scope["facts"] = {"id": request_id, "client": address}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await app(scope, receive, send_with_id)
        except Exception:
            status = 500  # an outer layer sends this status
            raise
        finally:
            # Probes and metrics are read every few seconds and would fill the log.
            if method == "POST" or status >= 400:
                seconds = time.perf_counter() - began
                if facts["client"] != address:  # the client is the name of a key
                    facts = {"id": request_id, "address": address} | facts
                shown = "".join(f" {name}={_quoted(value)}" for name, value in facts.items())
                request = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
                line = "%s %s %d in %.3f s%s"
                _LOG.info(line, method, path, status, seconds, shown, extra={"facts": request | facts})

    return answer


def _quoted(value: object) -> str:
    text = str(value)
    return text if _UNQUOTED.fullmatch(text) else json.dumps(text)
