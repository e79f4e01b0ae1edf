r"""Start servers of one checkpoint or several, or take running ones, load them in turn, and print one table.

python benchmarks/servers.py --server "drafter=redrafter serve w4 --drafter drafter" \
    --server "undrafted=redrafter serve w4 --no-speculate" --server "vllm=vllm serve w4" \
    --loads 1:12,8:64 --temperatures 0,1 --prompts chats.jsonl --output results

Each command gets a `--port`. A server starts when the one before is ready and, if it is `redrafter serve` on a GPU, has
captured its steps: an engine measures their costs while no other work runs there. Then each load goes to each server,
and at last they are ended. A running server has its address in place of a command: `--server ours=http://127.0.0.1:8000`.
A server that fails is left out from then on, and the exit code is 2.

Every load, at every temperature too, has prompts of its own while the file has some. The output folder gets
`loads.jsonl`, a line for each row of the table with the conditions, and the log of each server.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from aiohttp import ClientError, ClientSession, ClientTimeout

from load import Client, Load, LoadError, add_client_flags, connect
from redrafter.app.flags import floats
from redrafter.app.program import print_message, run_command
from redrafter.errors import ArgumentError
from redrafter.measure.record import hardware, versions
from redrafter.measure.table import cell_text

CAPTURING = "others are captured while no request waits"  # in the log of `redrafter serve` on a GPU, before it is ready
CAPTURED = "steps are captured, "  # there, once nothing is left to capture
LOG_LINES = 15  # printed of a server that fails
END_SECONDS = 30.0  # from SIGTERM to SIGKILL
SHOWN = (
    "tok/s",
    "steady",
    "tokens/step",
    "gap p50",
    "gap p99",
    "first p50",
    "first p99",
    "failed",
    "same texts",
    "client",
)


def command(text: str) -> tuple[str, list[str]]:
    """Parse "NAME=COMMAND" to a name and words; "NAME=URL" to a name and one word."""
    name, _, words = text.partition("=")
    if not re.fullmatch(r"[\w.-]+", name) or not words.strip():
        raise argparse.ArgumentTypeError(f"write NAME=COMMAND, such as 'ours=redrafter serve my-base', not {text!r}")
    return name, shlex.split(words)


def is_address(words: Sequence[str]) -> bool:
    """Return whether the words of `command` are the address of a running server."""
    return len(words) == 1 and words[0].startswith(("http://", "https://"))


def loads(text: str) -> list[tuple[int, int]]:
    """Parse "SIZE:REQUESTS,...", such as "1:12,8:64"."""
    return [(int(size), int(count)) for size, count in (load.split(":") for load in text.split(","))]


class Server:
    """A server: one that runs already, or one that is started, in a process group of its own, as it may start others.

    Attributes:
        name: Its name in the table.
        words: Its command, with its port; the address of one that runs already.
        url: Its address.
        log: The file with its output; None of one that runs already.
        version: What it answers to `/version`; None if nothing.
        failure: What went wrong; None while nothing has.
    """

    version: Any = None
    failure: LoadError | None = None
    log: Path | None = None
    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, name: str, words: Sequence[str], folder: Path):
        self.name, self.words, self.url = name, [*words], words[0].rstrip("/").removesuffix("/v1")
        if is_address(words):
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.words, self.url = [*words, "--port", str(port)], f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as file:
            self._process = subprocess.Popen(
                self.words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    async def wait_until_ready(self, session: ClientSession, seconds: float) -> None:
        """Wait until it is healthy and has nothing to capture; raise `LoadError` if it ends, or after the seconds."""
        began = time.monotonic()
        while await self._get(session, "/health") is None or self._captures():
            self.check_alive()
            if time.monotonic() - began > seconds:
                raise LoadError(f"is not ready after {seconds:g} s")
            await asyncio.sleep(0.2)
        with suppress(ValueError):
            self.version = json.loads(await self._get(session, "/version") or "null")
        print_message("note", f"{self.name} is ready after {time.monotonic() - began:.0f} s")

    async def _get(self, session: ClientSession, path: str) -> bytes | None:
        """Return the body of an answer; None without one, or with an error."""
        with suppress(ClientError, OSError, asyncio.TimeoutError):
            async with session.get(self.url + path, timeout=ClientTimeout(10)) as response:
                body = await response.read()
                return body if response.status == 200 else None
        return None

    def _captures(self) -> bool:
        text = "" if self.log is None else self.log.read_text(errors="replace")
        return CAPTURING in text and CAPTURED not in text

    def check_alive(self) -> None:
        """Raise `LoadError` if it has ended, where it was started here."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise LoadError(f"has ended with code {code}")

    def leave_out(self, error: LoadError) -> None:
        """Note and print what went wrong, with the end of the log, and end it."""
        self.failure = error
        if self.log is not None:
            print(*self.log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n", file=sys.stderr)
        above = f"; the end of its log {self.log} is above" if self.log else ""
        print_message("error", f"server {self.name} {error}{above}")
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, where it was started here."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, where it was started here."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)


def end(servers: Sequence[Server]) -> None:
    """End all processes of servers that were started here."""
    for server in servers:
        server.send(signal.SIGTERM)
    try:
        deadline = time.monotonic() + END_SECONDS
        for server in servers:
            server.wait(max(0.0, deadline - time.monotonic()))
    finally:  # also those whose parent has ended, and all at a second Ctrl-C
        for server in servers:
            server.send(signal.SIGKILL)
            server.wait()


async def measure_all(args: argparse.Namespace, servers: list[Server]) -> int:
    """Start servers, load each with each load, and print and write the rows.

    Returns the exit code: 2 if a server failed, else 1 if a request did.
    """
    todo, folder, failed, size_name = list[Load](), Path(args.output), 0, "streams" if args.loads else "req/s sent"
    for temperature, (size, count) in itertools.product(args.temperatures, args.loads or args.rates):
        todo.append(Load(size, count, sum(load.count for load in todo), temperature, random=args.loads is None))
    async with connect(args) as client:
        needed = sum(load.count for load in todo) + max(load.size for load in todo)  # with the longest warm-up
        if len(client.rows) < needed:
            print_message("note", f"there are {len(client.rows)} prompts, fewer than {needed}: loads repeat some")
        folder.mkdir(parents=True, exist_ok=True)
        for name, words in args.server:
            servers.append(Server(name, words, folder))
            try:
                await servers[-1].wait_until_ready(client.session, args.start_seconds)
            except LoadError as error:
                servers[-1].leave_out(error)
        conditions, widest = describe(servers), max(len(server.name) for server in servers)
        widths = [4, len(size_name), max(6, widest), *(max(9, len(name)) for name in SHOWN)]
        show(["T", size_name, "server", *SHOWN], widths)
        with (folder / "loads.jsonl").open("w") as file:
            for load, server in itertools.product(todo, servers):
                if server.failure:
                    continue
                line: dict[str, Any] = {"T": load.temperature, size_name: load.size, "server": server.name}
                try:
                    line |= await measure(client, server, load, args)
                except LoadError as error:
                    server.leave_out(error)
                    continue
                show([f"{load.temperature:g}", load.size, server.name, *map(line.get, SHOWN)], widths)
                print(json.dumps(line | {"conditions": conditions}), file=file, flush=True)
                failed += line["failed"]
    return 2 if any(server.failure for server in servers) else int(failed > 0)


async def measure(client: Client, server: Server, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """Load a server; raise `LoadError` if it answers nothing, too late, or has ended then."""
    seeded = server.name not in args.unseeded
    try:
        line = await asyncio.wait_for(client.measure(server.url, load, seeded=seeded), args.load_seconds)
    except asyncio.TimeoutError as error:
        raise LoadError(f"has not answered {load.count} requests in {args.load_seconds:g} s") from error
    except LoadError:
        server.check_alive()  # its end explains more
        raise
    server.check_alive()
    return line


def describe(servers: Sequence[Server]) -> dict[str, Any]:
    """Return the conditions that every line records; None for what no program here answers."""
    found = {
        "commit": ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"],
        "gpu": ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
    }
    outputs = dict[str, str | None].fromkeys(found)
    for name, words in found.items():
        with suppress(OSError, subprocess.CalledProcessError):
            outputs[name] = subprocess.check_output(words, text=True, stderr=subprocess.DEVNULL).strip()
    commands = {each.name: {"command": shlex.join(each.words), "version": each.version} for each in servers}
    host = {"hardware": hardware(torch.device("cpu")), "versions": versions()}
    return {"command": shlex.join(sys.argv), "servers": commands, **outputs, **host}


def show(cells: Sequence[object], widths: Sequence[int]) -> None:
    """Print a row of the table."""
    print("  ".join(cell_text(cell).rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


def main() -> int:
    """Compare the servers that the command line names. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named: dict[str, Any] = {"type": command, "action": "append", "required": True, "metavar": "NAME=COMMAND"}
    parser.add_argument("--server", **named, help="a server, without its port, or its address; once for each")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--loads", type=loads, metavar="N:REQUESTS,...", help="streams at once, and requests of a load")
    what.add_argument("--rates", type=loads, metavar="N:REQUESTS,...", help="requests per second, at random times")
    parser.add_argument(
        "--temperatures", type=floats, default=(0.0,), metavar="X,...", help="of the loads (default: 0)"
    )
    parser.add_argument(
        "--unseeded",
        action="append",
        default=[],
        metavar="NAME",
        help="a server whose requests have no seeds: vLLM's first runner draws those with seeds one by one",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of results and logs")
    parser.add_argument("--start-seconds", type=float, default=600.0, help="limit of a server's start (default: 600)")
    parser.add_argument("--load-seconds", type=float, default=600.0, help="limit of a load (default: 600)")
    add_client_flags(parser)
    args = parser.parse_args()

    def compare() -> int:
        if len({name for name, _ in args.server}) < len(args.server):
            raise ArgumentError("two servers have the same name")
        if unknown := {*args.unseeded} - {name for name, _ in args.server}:
            raise ArgumentError(f"--unseeded names no server: {', '.join(sorted(unknown))}")
        for name, words in args.server:
            if not is_address(words) and shutil.which(words[0]) is None:
                raise ArgumentError(f"server {name}: there is no program {words[0]}")
        servers = list[Server]()
        try:
            return asyncio.run(measure_all(args, servers))
        finally:
            end(servers)

    return run_command(compare)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, which ends the servers too
        signal.signal(number, signal.default_int_handler)
    raise SystemExit(main())
