"""Attacks that cost a server much for each request, and what they take from the pace of another client.

PYTHONPATH=tests python tests/serve/fuzz_fairness.py --goals

Prints a table of the longest times in seconds: between two tokens of another client's streams, to their first token,
and of /health. With --goals, exits with 1 where one is longer than its goal, which two idle cores reach.
"""

import argparse
import collections
import http.client
import json
import multiprocessing
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

GOALS = {"gap": 0.3, "first token": 0.5, "health": 0.1}  # seconds
ATTACKER, INNOCENT = "127.0.0.7", "127.0.0.9"  # addresses: without keys, each is a client
PATIENCE = 60.0  # seconds for an answer


def _said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} | more


MARKS = ("a b c <tool_call> <|im_end|> " * 70_000)[:2_000_000]
WORDS = ("The old man looked at the sea and " * 60_000)[:2_000_000]
THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "x" * 3000}]}
THOUGHTS = [THOUGHT, {"role": "user", "content": "y"}] * 300
EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}] * 4000}
FIELDS = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(50)}}
TOOLS = [{"name": f"f{number}", "description": "x" * 14_000, "input_schema": FIELDS} for number in range(128)]
COUNT, TOKENIZE, MESSAGES = "/v1/messages/count_tokens", "/tokenize", "/v1/messages"
# By name: how many connections, the path and the body.
ATTACKS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "2 MB of marks to count_tokens x 8": (8, COUNT, _said(MARKS)),
    "2 MB of words to count_tokens x 8": (8, COUNT, _said(WORDS)),
    "2 MB of marks to tokenize x 8": (8, TOKENIZE, {"prompt": MARKS, "return_token_strs": True}),
    "2 MB of spaces to tokenize x 8": (8, TOKENIZE, {"prompt": " " * 2_000_000, "return_token_strs": True}),
    "2 MB of marks to completions x 8": (8, "/v1/completions", {"prompt": MARKS, "max_tokens": 1}),
    "30 KB to count_tokens x 32": (32, COUNT, _said("a b c d" * 4300)),
    "30 KB to tokenize x 32": (32, TOKENIZE, {"prompt": "a b c d" * 4300, "return_token_strs": True}),
    "4 KB of marks to count_tokens x 64": (64, COUNT, _said("a<|im_end|>" * 340)),
    "7 KB to count_tokens x 32": (32, COUNT, _said("a b c d" * 1000)),
    "300 thoughts to messages x 8": (8, MESSAGES, {"max_tokens": 1, "messages": THOUGHTS, "context_management": EDITS}),
    "128 tools to messages x 8": (8, MESSAGES, _said("a", max_tokens=2, tools=TOOLS, tool_choice={"type": "any"})),
}


def connect(url: str, source: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE, source_address=(source, 0))


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> http.client.HTTPResponse:
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection.getresponse()


def attack(url: str, name: str, seconds: float, begin: Any, results: Any) -> None:
    """Send an attack again and again, and put the number of answers by status."""
    count, path, fields = ATTACKS[name]
    begin.wait()
    body, end = json.dumps(fields).encode(), time.monotonic() + seconds
    statuses: collections.Counter[str] = collections.Counter()

    def send() -> None:
        while time.monotonic() < end:
            connection = connect(url, ATTACKER)
            try:
                answer = post(connection, path, body)
                answer.read()
                statuses[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                statuses[type(error).__name__] += 1
            connection.close()

    threads = [threading.Thread(target=send) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(dict(statuses))


def watch(url: str, seconds: float, begin: Any, results: Any) -> None:
    """Stream texts one after the other and ask /health, and put the longest times and what has failed."""
    begin.wait()
    longest, failed, end = dict.fromkeys(GOALS, 0.0), list[str](), time.monotonic() + seconds
    fields = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()

    def note(name: str, begin: float) -> float:
        now = time.monotonic()
        longest[name] = max(longest[name], now - begin)
        return now

    def stream() -> None:
        connection, last = connect(url, INNOCENT), time.monotonic()
        answer, name = post(connection, "/v1/completions", body), "first token"
        if answer.status != 200:
            failed.append(f"a stream: {answer.status}")
        for line in answer:
            if line.startswith(b"data: {"):
                last, name = note(name, last), "gap"
        connection.close()

    def ask_health() -> None:
        connection, begin = connect(url, INNOCENT), time.monotonic()
        connection.request("GET", "/health")
        if (status := connection.getresponse().status) != 200:
            failed.append(f"/health: {status}")
        note("health", begin)
        connection.close()
        time.sleep(0.05)

    def repeat(work: Any) -> None:
        while time.monotonic() < end:
            try:
                work()
            except (OSError, http.client.HTTPException) as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=repeat, args=(work,)) for work in (stream, ask_health)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((longest, failed))


def measure(url: str, name: str | None, seconds: float) -> tuple[dict[str, float], list[str], dict[str, int]]:
    """Return the longest times during an attack, or without one, what has failed, and the attacker's answers."""
    context = multiprocessing.get_context("spawn")  # processes of their own: threads here would wait for each other
    watched, attacked, begin = context.Queue(), context.Queue(), context.Barrier(1 if name is None else 2)
    processes = [context.Process(target=watch, args=(url, seconds, begin, watched))]
    if name is not None:
        processes.append(context.Process(target=attack, args=(url, name, seconds, begin, attacked)))
    for process in processes:
        process.start()
    longest, failed = watched.get()
    statuses = {} if name is None else attacked.get()
    for process in processes:
        process.join()
    return longest, failed, statuses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8, help="of each attack")
    parser.add_argument("--only", default="", help="a part of the names of the attacks to run")
    parser.add_argument("--goals", action="store_true", help="fail where a goal is missed")
    parser.add_argument("serve", nargs="*", help="the model and options of the server, after --")
    args = parser.parse_args()
    from helpers.serving import Program  # not above: the other processes need none of its imports

    program, wrong = Program("--max-batch-size", "16", *args.serve), list[str]()
    print(f"{'attack':36}" + "".join(f"{name:>14}" for name in GOALS) + "  answers to the attacker")
    try:
        measure(program.url, None, 2)  # the first requests start what they need
        for name in [None, *(name for name in ATTACKS if args.only in name)]:
            longest, failed, statuses = measure(program.url, name, args.seconds)
            label = name or "none"
            print(f"{label:36}" + "".join(f"{longest[goal]:14.3f}" for goal in GOALS) + f"  {statuses}", flush=True)
            missed = [goal for goal, most in GOALS.items() if longest[goal] > most]
            wrong += [f"{label}: {what}" for what in failed]
            wrong += [f"{label}: {goal} is {longest[goal]:.3f} s" for goal in missed if args.goals]
            if any(status.startswith("5") and status not in ("501", "503") for status in statuses):
                wrong.append(f"{label}: answered with {statuses}")
        if not program.healthy:
            wrong.append("the server is not healthy at the end")
    finally:
        program.end()
    for each in wrong:
        print(f"VIOLATION {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
