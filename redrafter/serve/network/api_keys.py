"""Collect the API keys of a server, and identify the key that a client sent."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from redrafter.errors import ArgumentError

KEY_VARIABLE = "REDRAFTER_API_KEY"  # environment variable with one key
OPERATOR_KEY_VARIABLE = "REDRAFTER_OPERATOR_KEY"  # environment variable with one operator's key


class ApiKeys:
    """The API keys of a server. Without keys, everybody may send requests."""

    def __init__(self, keys: Iterable[str] = (), name: str = "key"):
        self._name = name
        # Digests have equal lengths, so that comparison times do not reveal a key's length.
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def client(self, authorization: bytes, *keys: bytes) -> str | None:
        """Return the name of the key in an `Authorization` header or among bare `keys`, or None if there is none.

        A key's name is its number, such as `key-2` or `operator-1`: it may be logged without revealing the key.
        """
        scheme, _, token = authorization.partition(b" ")
        name = None
        for key in filter(None, (token if scheme.lower() == b"bearer" else b"", *keys)):
            sent = _digest(key.strip())
            for number, digest in enumerate(self._digests, 1):  # compare all: the time must not reveal the match
                if hmac.compare_digest(sent, digest):
                    name = f"{self._name}-{number}"
        return name


def collect_keys(given: Iterable[str], file: str | None) -> ApiKeys:
    """Collect keys from the command line, the environment, and a file with one key per line, in this order.

    Raises `ArgumentError` if the file cannot be read or holds no key, or a key cannot be sent in a header.
    """
    keys = [*given, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ArgumentError(f"--api-key-file {file} cannot be read: {reason}") from error
        read = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not read:
            raise ArgumentError(f"--api-key-file {file} holds no key: write a key a line")
        keys += read
    _check(keys, "an API key")
    return ApiKeys(keys)


def collect_operator_keys(given: Iterable[str], others: ApiKeys) -> ApiKeys:
    """Collect operators' keys from the command line and the environment.

    Raises `ArgumentError` if one cannot be sent in a header, or is also a client's key.
    """
    keys = [*given, *filter(None, [os.environ.get(OPERATOR_KEY_VARIABLE)])]
    _check(keys, "an operator's key")
    if any(others.client(f"Bearer {key}".encode()) for key in keys):
        raise ArgumentError("an operator's key is an API key too: give operators keys of their own")
    return ApiKeys(keys, "operator")


def _check(keys: Iterable[str], what: str) -> None:
    for key in keys:
        if not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise ArgumentError(f"{what} must be of printable ASCII characters, without spaces around it")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
