"""The keys that clients must send, and who sent which."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from redrafter.errors import ArgumentError

__all__ = ["ENVIRONMENT", "ApiKeys", "collect_keys"]

ENVIRONMENT = "REDRAFTER_API_KEY"


class ApiKeys:
    """The keys of a server. Without any, everybody may come in."""

    def __init__(self, keys: Iterable[str] = ()):
        # A digest has the same length for every key, so that a comparison tells nothing of a key's own length.
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def client(self, authorization: bytes) -> str | None:
        """Return the name of the key in an `Authorization` header, or None where it holds no key of this server.

        A key's name is its place among the keys, such as `key-2`: a log may hold it, and it tells nothing of the key.
        """
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        sent, name = _digest(token.strip()), None
        for place, digest in enumerate(self._digests, 1):  # all of them, so that time does not tell which one it was
            if hmac.compare_digest(sent, digest):
                name = f"key-{place}"
        return name


def collect_keys(given: Iterable[str], file: str | None) -> ApiKeys:
    """Return the keys of the command line, then that of the environment, then those of a file, a key a line.

    Raises `ArgumentError` for a file that cannot be read or holds no key, and for a key that no header can hold.
    """
    keys = [*given, *filter(None, [os.environ.get(ENVIRONMENT)])]
    if file is not None:
        keys += _read(file)
    for key in keys:
        if not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise ArgumentError("an API key must be of printable ASCII characters, without spaces around it")
    return ApiKeys(keys)


def _read(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ArgumentError(f"--api-key-file {file} cannot be read: {reason}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ArgumentError(f"--api-key-file {file} holds no key: write a key a line")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
