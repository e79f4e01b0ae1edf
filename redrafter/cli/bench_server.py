"""`redrafter bench --url`: measure servers of OpenAI's protocol under load, and report."""

import argparse
import asyncio
import os
import platform
import shlex
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from redrafter.app.flags import flag, read_options
from redrafter.app.options import LoadOptions, PromptOptions
from redrafter.bench.http_stream import Address
from redrafter.bench.options import BenchOptions, ServerOptions
from redrafter.bench.server_load import Load, find_server
from redrafter.bench.server_suite import run_server_suite
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
MIN_REQUESTS_PER_SLOT = 4
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
    num_requests = {
        concurrency: asked.num_requests or max(options.num_prompts, MIN_REQUESTS_PER_SLOT * concurrency)
        for concurrency in asked.concurrency
    }
    key, addresses = _api_key(asked), [Address.parse(url) for url in asked.url]  # all, before any is asked
    servers = [asyncio.run(find_server(address, getattr(args, "model", None), key)) for address in addresses]
    # The conditions of the measurement, without the API key.
    words = ["KEY" if asked.api_key and asked.api_key in word else word for word in sys.argv[1:]]
    typed = asdict(options) | asdict(asked) | {"api_key": None}
    versions = {"redrafter": __version__, "python": platform.python_version()}
    facts: dict[str, Any] = {
        "command": shlex.join(["redrafter", *words]),
        "servers": [
            {"url": server.address.url, "model": server.model, "kind": server.kind, "version": server.version}
            for server in servers
        ],
        "prompts": options.prompts or "those that ship",
        "client": f"{platform.machine()} CPU, {os.cpu_count()} cores, one process",
        "versions": versions,
        "options": {name: value for name, value in typed.items() if name in MEANINGFUL or hasattr(asked, name)},
    }
    report = Report(facts, path=None if options.json is None else Path(options.json))
    report.line(facts["command"])
    for number, server in enumerate(servers, start=1):
        known = "".join(f", {fact}" for fact in (server.kind, server.version) if fact)
        report.line(f"server {number}: {server.address.url}, model {server.model}{known}")
    report.line(f"client: {facts['client']}; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    report.line(
        f"{len(load.prompts)} prompts from {facts['prompts']}; {load.max_new_tokens} new tokens, end of text ignored; "
        f"temperature {load.temperature:g}, seed {load.seed} and up"
    )
    report.line("prompts come again: a server that keeps keys and values of earlier prompts need not read them anew")
    run_server_suite(report, servers, load, num_requests)
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
