"""Serve the pages at `/` and `/docs`, each a single file without external resources."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi.responses import HTMLResponse


def page(name: str, status: int = 200) -> HTMLResponse:
    """Return a page whose security policy allows only its own script and style, and requests to its own server."""
    text = files("redrafter.serve.routes").joinpath(name).read_text(encoding="utf-8")
    # The page shows text of the model, which may contain HTML: only its own scripts may run.
    policy = {
        "default-src": "'none'",
        "script-src": _hashes("script", text),
        "style-src": _hashes("style", text),
        "img-src": "data:",  # its icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # assigning a string as HTML raises
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, status, headers)


def _hashes(tag: str, text: str) -> str:
    sources = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
