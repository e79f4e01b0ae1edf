"""`redrafter bench --url`: measure servers of OpenAI's protocol under load, and report."""

import argparse
import asyncio
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from redrafter.app.flags import flag, read_options
from redrafter.app.options import LoadOptions, PromptOptions
from redrafter.bench.http_stream import Address
from redrafter.bench.server_load import Load, Server, find_server
from redrafter.bench.server_suite import LoadPlan, run_server_suite
from redrafter.cli.options import BenchOptions, ServerOptions
from redrafter.data.rows import Row
from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import check_writable
from redrafter.measure.prompts import read_prompts
from redrafter.measure.report import Report
from redrafter.serve.network.api_keys import KEY_VARIABLE
from redrafter.version import __version__

__all__ = ["run"]

# Options of `bench` that mean something to a server; all others are refused with --url.
MEANINGFUL = frozenset({"json", "max_new_tokens", "model", "num_prompts", "prompts", "seed", "temperature"})
INSTEAD = {"batch_sizes": "give --concurrency", "repeats": "give --num-requests"}
KEY_VARIABLES = (KEY_VARIABLE, "OPENAI_API_KEY")


def run(args: argparse.Namespace) -> int:
    """Run the command: check the options, ask the servers what they serve, measure, print the report."""
    _refuse_meaningless(args)
    options, asked = read_options(BenchOptions, args), read_options(ServerOptions, args)
    if options.json is not None:
        check_writable(Path(options.json), "--json")
    load = Load(
        [_text(row) for row in read_prompts(options.prompts)],
        options.max_new_tokens,
        options.temperature,
        options.seed,
    )
    plan = LoadPlan(load, asked.concurrency, asked.num_requests, options.num_prompts)
    servers = asyncio.run(_find_servers(asked.url, getattr(args, "model", None), _api_key(asked)))
    facts = _facts(servers, options, asked)
    report = Report(facts, path=None if options.json is None else Path(options.json))
    for line in _head(servers, load, facts):
        report.line(line)
    run_server_suite(report, servers, plan)
    return report.finish()


def _refuse_meaningless(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` for the first option on the command line that means nothing to a server."""
    for item in (item for options in (BenchOptions, LoadOptions) for item in fields(options)):
        if hasattr(args, item.name) and item.name not in MEANINGFUL:
            name = flag(("no_" if item.default is True else "") + item.name)
            cut = item.name in {field.name for field in fields(PromptOptions)}
            hint = "prompts are sent as text, so shorten them in the file" if cut else INSTEAD.get(item.name)
            raise ArgumentError(f"{name} has no meaning with --url: leave it out" + (f", and {hint}" if hint else ""))


def _text(row: Row) -> str:
    """Return the text that a row's prompt is. Raises `ArgumentError` where it is none."""
    text = row.prompt if row.prompt is not None else row.text
    if not text:
        raise ArgumentError(f"{row.where} has no plain text to send to /v1/completions: with --url, rows need a prompt")
    return text


def _api_key(asked: ServerOptions) -> str | None:
    """Return the key of the command line, or that of the environment, or None."""
    given = (asked.api_key, *(os.environ.get(name) for name in KEY_VARIABLES))
    key = next(filter(None, given), None)
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ArgumentError("an API key must be of printable ASCII characters, without spaces")
    return key


async def _find_servers(urls: Sequence[str], model: str | None, key: str | None) -> list[Server]:
    addresses = [Address.parse(url) for url in urls]  # all, before any is asked
    return [await find_server(address, model, key) for address in addresses]


def _facts(servers: Sequence[Server], options: BenchOptions, asked: ServerOptions) -> dict[str, Any]:
    """Return the conditions of the measurement, without the API key."""
    words = ["KEY" if asked.api_key and asked.api_key in word else word for word in sys.argv[1:]]
    typed = asdict(options) | asdict(asked)
    return {
        "command": shlex.join(["redrafter", *words]),
        "servers": [
            {"url": server.address.url, "model": server.model, "kind": server.kind, "version": server.version}
            for server in servers
        ],
        "prompts": options.prompts or "those that ship",
        "client": f"{platform.machine()} CPU, {os.cpu_count()} cores, one process",
        "versions": {"redrafter": __version__, "python": platform.python_version()},
        "options": {name: typed[name] for name in typed if name in MEANINGFUL or hasattr(asked, name)}
        | {"api_key": None},
    }


def _head(servers: Sequence[Server], load: Load, facts: dict[str, Any]) -> list[str]:
    """Return the lines that state the conditions, for the top of the printed report."""
    used = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        facts["command"],
        *(
            f"server {number}: {server.address.url}, model {server.model}"
            + "".join(f", {known}" for known in (server.kind, server.version) if known)
            for number, server in enumerate(servers, start=1)
        ),
        f"client: {facts['client']}; {used}",
        f"{len(load.prompts)} prompts from {facts['prompts']}; {load.max_new_tokens} new tokens, end of text ignored; "
        f"temperature {load.temperature:g}, seed {load.seed} and up",
        "prompts come again: a server that keeps keys and values of earlier prompts need not read them anew",
    ]
