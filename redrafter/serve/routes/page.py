"""The pages at `/` and `/docs`: each is one file that needs nothing else, and may load nothing else."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi.responses import HTMLResponse

__all__ = ["page"]


def page(name: str, status: int = 200) -> HTMLResponse:
    """Return a page with a policy under which only its own script and style count, and only its own server is asked.

    name: a file beside this one.
    status: what the browser is told with it.
    """
    text = files("redrafter.serve.routes").joinpath(name).read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hashes("script", text),
        "style-src": _hashes("style", text),
        "img-src": "data:",  # its icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, status, headers)


def _hashes(tag: str, text: str) -> str:
    found = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
