"""The page at `/`: one file that needs nothing else, and may load nothing else."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi.responses import HTMLResponse

__all__ = ["page"]


def page() -> HTMLResponse:
    """With a policy under which only its own script and style count, and only its own server is asked."""
    text = files("redrafter.serve").joinpath("page.html").read_text(encoding="utf-8")
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
    return HTMLResponse(text, headers=headers)


def _hashes(tag: str, text: str) -> str:
    found = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
