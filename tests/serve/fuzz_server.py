"""Thousands of hostile requests against a server of its own, and what everybody else notices meanwhile.

PYTHONPATH=tests python tests/serve/fuzz_server.py --requests 8000

Prints a report. Exits with 1 where anything was answered with a 5xx other than 501 and 503 or not at all, where
/health took too long, where the memory grew, or where an innocent stream waited too long for its next token.
"""

import argparse
import collections
import copy
import json
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from fuzz_sockets import ATTACKS, attack

from helpers.serving import Program

HEALTH, GAP, GROWTH = 0.5, 1.0, 1.5  # seconds, seconds, times the memory after the first tenth
PATIENCE = 60.0  # seconds for an answer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SAID = [{"role": "user", "content": "Hello"}]
TEXT = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Hello", "max_tokens": 3, "n": 2, "seed": 1, "stop": ["x"], "logprobs": 2},
        {"prompt": [1, 2, 3], "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "max_tokens": 4, "logit_bias": {"5": 1}, "top_k": 3, "min_p": 0.1},
        {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[ab]{2}"}},
        {"prompt": "a", "max_tokens": 9, "structured_outputs": {"json": {"type": "integer"}}},
    ],
    "/v1/chat/completions": [
        {"messages": SAID, "max_tokens": 3, "temperature": 0.5, "logprobs": True, "top_logprobs": 2},
        {"messages": SAID, "max_completion_tokens": 9, "tools": [TOOL], "tool_choice": "required", "stream": True},
        {
            "messages": [*SAID, {"role": "assistant", "content": "a"}, *SAID],
            "max_tokens": 9,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}},
        },
    ],
    "/v1/responses": [
        {"input": "Hello", "max_output_tokens": 3, "instructions": "Be brief.", "stream": True},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "b"},
            ],
            "max_output_tokens": 9,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "text": {"format": {"type": "json_object"}},
        },
    ],
    "/v1/messages": [
        {"messages": SAID, "max_tokens": 3, "system": [TEXT], "stop_sequences": ["x"], "stream": True, "top_k": 5},
        {
            "messages": [
                {"role": "user", "content": [TEXT, {"type": "image", "source": PIXEL}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "b"}, USE]},
                {"role": "system", "content": "c"},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [TEXT]}, TEXT]},
            ],
            "max_tokens": 9,
            "tools": [{"name": "f", "description": "g", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "output_config": {"effort": "low"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
        {
            "messages": SAID,
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "boolean"}}},
        },
    ],
    "/v1/messages/count_tokens": [{"messages": SAID, "system": "a", "tools": [{"name": "f", "input_schema": {}}]}],
    "/tokenize": [{"prompt": "Hello", "return_token_strs": True}, {"messages": SAID, "add_generation_prompt": False}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
FIELDS = sorted({name for bodies in BODIES.values() for body in bodies for name in body})
HALF = "\ud800"
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, -0.0, 1e308, 0.5, float("nan"), float("inf")),
    *("", " ", "a" * 5000, HALF, "\x00", "\U0001f600" * 50, "{{ 7*7 }}"),
    *("<|user|>", "[" * 300, "(a*)*b", "%s%n", "../.."),
    *([], {}, [[]], [{}], {"": ""}, [None] * 50, {"a": {"a": {"a": {}}}}, [1] * 3000, {HALF: 1}, {"$ref": "#"}),
    *({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"anyOf": []}, {"pattern": "(?=a)"}, {"minItems": 10**9}),
]


def mutated(made: random.Random) -> tuple[str, bytes]:
    """A path and a body that was valid before something happened to it; to some, nothing does."""
    path = made.choice(list(BODIES))
    body = copy.deepcopy(made.choice(BODIES[path]))
    for _ in range(made.choice((0, 1, 1, 1, 2, 4))):
        places = list(_places(body))
        if not places:
            body["x"] = None
            continue
        holder, key = made.choice(places)
        kind = made.random()
        if kind < 0.6:
            holder[key] = copy.deepcopy(made.choice(ODD))
        elif kind < 0.75:
            del holder[key]
        elif kind < 0.9:
            body[made.choice(FIELDS)] = copy.deepcopy(made.choice(ODD))
        else:
            holder[key] = _deep(holder[key], made.choice((2, 40, 400)))
    if made.random() < 0.9 and path.startswith("/v1"):  # most are answered soon, so that many can be asked
        limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
        if isinstance(body.get(limit, 10**9), int | float) and body.get(limit, 10**9) > 20:
            body[limit] = 9
    try:
        text = json.dumps(body).encode()
    except RecursionError:
        text = b"[" * 100_000
    if made.random() < 0.05:
        at = made.randrange(len(text))
        text = text[:at] + bytes([made.randrange(256)]) + text[at + 1 :]
    return path, text


def _places(part: Any) -> Any:
    """Everything that stands in a body, by what holds it."""
    for key in list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield part, key
        yield from _places(part[key])


def _deep(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


# In a process of its own: as a thread here it would wait for those that send.
ASK_HEALTH = """
import sys, time, httpx
with httpx.Client(base_url=sys.argv[1], timeout=float(sys.argv[2])) as client:
    while True:
        begin = time.monotonic()
        try:
            client.get("/health")
        except httpx.TransportError as error:
            print(repr(error), flush=True)
        print(time.monotonic() - begin, flush=True)
        time.sleep(0.1)
"""


class Watch:
    """What everybody else notices: how long /health takes, the memory, and the gaps of a stream."""

    def __init__(self, program: Program):
        self.program, self.ended = program, threading.Event()
        self.health: list[float] = []
        self.memory: list[float] = []  # MiB
        self.gaps: list[float] = []
        self.failed: list[str] = []
        words = [sys.executable, "-c", ASK_HEALTH, program.url, str(PATIENCE)]
        self._asking = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._threads = [threading.Thread(target=each) for each in (self._health, self._memory, self._stream)]
        for each in self._threads:
            each.start()

    def end(self) -> None:
        self.ended.set()
        self._asking.terminate()
        for each in self._threads:
            each.join()

    def _health(self) -> None:
        assert self._asking.stdout is not None
        for line in self._asking.stdout:
            try:
                self.health.append(float(line))
            except ValueError:
                self.failed.append(f"/health: {line.strip()}")

    def _memory(self) -> None:
        status = Path(f"/proc/{self.program.process.pid}/status")
        while not self.ended.wait(0.5) and self.program.process.poll() is None:
            [kilobytes] = re.findall(r"VmRSS:\s+(\d+)", status.read_text())
            self.memory.append(int(kilobytes) / 1024)

    def _stream(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not self.ended.wait(0.1):
            try:
                with httpx.stream("POST", f"{self.program.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
                    last = None
                    for line in answer.iter_lines():
                        now = time.monotonic()
                        if line and last is not None:
                            self.gaps.append(now - last)
                        last = now if line else last
            except httpx.TransportError as error:
                self.failed.append(f"the innocent stream: {error!r}")


class Fuzz:
    """Sends requests and remembers what came."""

    def __init__(self, program: Program, seed: int, minutes: float):
        self.program, self.seed = program, seed
        self.until, self.sent = time.monotonic() + 60 * minutes, 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def __call__(self, number: int) -> None:
        if time.monotonic() > self.until:
            return
        self.sent += 1
        made = random.Random(self.seed * 1_000_000 + number)
        if made.random() < 0.25:
            name = made.choice(list(ATTACKS))
            self._note(attack(self.program.url, name, made), f"number {number}: socket attack {name!r}")
            return
        path, body = mutated(made)
        told = f"number {number}: curl -X POST URL{path} -H 'content-type: application/json' -d '{body[:400]!r}'"
        try:
            headers = {"content-type": "application/json"}
            answer = httpx.post(f"{self.program.url}{path}", content=body, headers=headers, timeout=PATIENCE)
            self._note([answer.status_code], f"{told}\n      {answer.text[:300]}")
        except httpx.TransportError as error:
            self.wrong.append(f"{told}\n      {error!r}")

    def _note(self, statuses: list[int], told: str) -> None:
        for status in statuses or [0]:
            self.counts[f"{status}" if status else "closed"] += 1
            if status >= 500 and status not in (501, 503):
                self.wrong.append(f"{status}: {told}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8000, help="to send")
    parser.add_argument("--minutes", type=float, default=60, help="after which no more are sent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    args = parser.parse_args()
    program = Program("--max-batch-size", "16")
    watch, fuzz, began = Watch(program), Fuzz(program, args.seed, args.minutes), time.monotonic()
    wrong = fuzz.wrong
    try:
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(fuzz, range(args.requests)))
        seconds = time.monotonic() - began
        print(f"requests: {fuzz.sent} in {seconds:.0f} s; statuses {dict(fuzz.counts.most_common())}", flush=True)
    finally:
        watch.end()
    early, late = (max(part, default=0.0) for part in _tenths(watch.memory))
    gaps = sorted(watch.gaps)
    print(f"/health: {len(watch.health)} asked, longest {max(watch.health, default=0):.3f} s")
    print(f"memory: {early:.0f} MiB at most in the first tenth, {late:.0f} in the last, {max(watch.memory):.0f} ever")
    print(f"innocent stream: {len(gaps)} gaps, longest {[round(gap, 3) for gap in gaps[-5:]]} s")
    wrong += watch.failed
    for bad, what in (
        (max(watch.health, default=0) > HEALTH, f"/health took longer than {HEALTH} s"),
        (late > GROWTH * early, f"the memory grew by more than {GROWTH} times"),
        (max(gaps, default=0) > GAP, f"a stream waited longer than {GAP} s for its next token"),
        (program.process.poll() is not None, "the server ended"),
        (not program.healthy, "the server is not healthy at the end"),
    ):
        wrong += [what] if bad else []
    for each in wrong[:40]:
        print(f"VIOLATION {each}")
    program.end()
    print(f"{len(wrong)} violations")
    return 1 if wrong else 0


def _tenths(values: list[float]) -> tuple[list[float], list[float]]:
    size = max(len(values) // 10, 1)
    return values[:size], values[-size:]


if __name__ == "__main__":
    sys.exit(main())
