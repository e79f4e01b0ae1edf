"""Which replica a request goes to: the one that has read the beginning of its prompt, unless that one is busy.

Requests of one session, and prompts that begin alike, have the same key. For each key the replicas have an order of
their own, by a hash of both (rendezvous hashing), which every router computes alike; a replica that comes or goes
changes it only for the keys that it is first for. A request goes to the first replica in the order of its key that is
not full (consistent hashing with bounded loads, https://arxiv.org/abs/1608.01350).
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["SESSION_HEADER", "rank_replicas", "routing_key"]

SESSION_HEADER = b"x-session-id"  # as Ray Serve has it
KEY_CHARACTERS = 256  # of a prompt's beginning: some four blocks of keys and values
KEY_TOKENS = 64
SHARE_ABOVE_MEAN = 1.25  # of the mean number of requests per replica, that each may have
PROMPT_FIELDS = ("prompt", "messages", "instructions", "input")  # of completions, chats and responses
SYSTEM_ROLES = ("system", "developer")


def routing_key(session: bytes | None, document: Mapping[str, Any]) -> str | None:
    """Return the key of a request: its session, or how its prompt begins; None for a request without a prompt.

    Args:
        session: Value of `SESSION_HEADER`, if it was sent.
        document: Body of the request, which nobody has checked yet.
    """
    if session:
        return "session " + session.decode("latin-1")
    prompt = next((document[name] for name in PROMPT_FIELDS if document.get(name)), None)
    if prompt is None:
        return None
    named = (document.get(name) for name in ("model", "cache_salt"))
    return json.dumps([*(name if isinstance(name, str) else None for name in named), _beginning(prompt)])


def rank_replicas(key: str, loads: Mapping[str, int], target: float) -> list[str]:
    """Return the names of all replicas, the best for a key first: those that are not full, then the least loaded.

    Args:
        key: Key of the request.
        loads: Number of requests that each replica has, by name.
        target: Requests that a replica may have, however few the others have.
    """
    order = sorted(loads, key=lambda name: hashlib.sha256(f"{name} {key}".encode()).digest())
    limit = max(target, math.ceil(SHARE_ABOVE_MEAN * (sum(loads.values()) + 1) / max(len(loads), 1)))
    free = [name for name in order if loads[name] < limit]
    full = [name for name in order if loads[name] >= limit]
    return free + sorted(full, key=lambda name: loads[name])


def _beginning(prompt: Any) -> str:
    """Return how a prompt begins: a text, token ids, messages, or a list of prompts, of which the first counts."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:KEY_CHARACTERS]
    if not isinstance(prompt, list):
        return ""
    messages = [part for part in prompt if isinstance(part, dict)]
    if not messages:
        return " ".join(str(token) for token in prompt[:KEY_TOKENS] if isinstance(token, int))
    system = (message for message in messages if message.get("role") in SYSTEM_ROLES)
    return _text(next(system, messages[0]).get("content"))[:KEY_CHARACTERS]


def _text(content: Any) -> str:
    """Return the text of a message's content: a text, or parts of which some have one."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return " ".join(text for text in texts if isinstance(text, str))
