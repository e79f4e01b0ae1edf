"""`redrafter bench`: measure a pair on a workload, or with --url servers under load, and print a report."""

import argparse
import asyncio
import os
import platform
import shlex
import sys
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redrafter.app.flags import flag, read_options
from redrafter.app.loading import NO_DRAFT_OPTIONS, Pair, check_options
from redrafter.app.options import LoadOptions, PromptOptions, SuiteOptions
from redrafter.app.templates import require_template
from redrafter.bench.options import BenchOptions, ServerOptions
from redrafter.bench.padded_model import SHAPES, describe, pad_drafter, pad_model, unmasked
from redrafter.bench.sections import run_sections
from redrafter.bench.server_load import chat_fields
from redrafter.bench.suite import run_suite
from redrafter.checkpoints.models import quantize_drafter, quantize_model
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.prompts import turns_before_answer
from redrafter.data.rows import Row
from redrafter.data.suites import Dialogues, Suite, read_suite
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.engine.redrafter import ReDrafter
from redrafter.engine.tuning import find_tuning
from redrafter.errors import ArgumentError, MissingDependencyError, UnsupportedError, how_to_install
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.report import Names, Report, describe_versions, facts, head, versions
from redrafter.measure.run import Workload
from redrafter.measure.suite_table import LEGEND
from redrafter.model.target import Target
from redrafter.parallel.launched import launched_processes, process_rank
from redrafter.serve.network.api_keys import KEY_VARIABLE
from redrafter.tree.sizes import TreeShape

# Options of `bench` that apply to servers; all others are rejected with --url.
SERVER_OPTIONS = frozenset({"json", "max_new_tokens", "model", "num_prompts", "prompts", "seed", "temperature"})
INSTEAD = {"batch_sizes": "give --concurrency", "repeats": "give --num-requests"}
INSTEAD |= dict.fromkeys(("chat_template", "chat_template_kwargs"), "a server has its own")
INSTEAD |= {item.name: "prompts are sent as they are, so shorten them in the file" for item in fields(PromptOptions)}
# Options that do not apply to a suite: they select other prompts, or measure something other than speed.
NOT_OF_SUITES = frozenset(
    {"prompts", "prompt_share", "prompt_tokens", "waves", "context", "against", "assistant_model"}
)
NOT_OF_SUITES |= {"draft_vocab_sizes", "plots", "num_requests"}
MIN_REQUESTS_PER_SLOT = 4
KEY_VARIABLES = (KEY_VARIABLE, "OPENAI_API_KEY")
SHIPPED_PROMPTS = "those that ship"


def run_checked(args: argparse.Namespace) -> int:
    """Run the command: validate the options, run the measurements and print the report."""
    if "url" not in args:
        return _bench_pair(args)
    if launched_processes() > 1:
        raise ArgumentError("--url measures servers from one process: start it without torchrun")
    return _bench_servers(args)


def _bench_pair(args: argparse.Namespace) -> int:
    for item in fields(ServerOptions):
        if item.name in args:
            raise ArgumentError(f"{flag(item.name)} is for --url: give that too")
    options, load = read_options(BenchOptions, args), read_options(LoadOptions, args)
    asked = read_options(SuiteOptions, args)
    asked.refuse_others(args, NOT_OF_SUITES)
    if launched_processes() > 1:
        for name in ("pad_to", "against"):
            if vars(options)[name]:
                raise ArgumentError(
                    f"{flag(name)} measures a model in one process: leave it out, or start it without torchrun"
                )
        if process_rank() > 0:  # rank 0 alone writes files
            options, asked = replace(options, json=None, plots=None), replace(asked, csv=None, markdown=None)
    if options.pad_to is not None and options.pad_to not in SHAPES:
        raise ArgumentError(f"--pad-to knows {', '.join(SHAPES)}, got {options.pad_to!r}")
    suite = _read_suite(args, asked, options.seed)
    rows = read_prompts(options.prompts) if suite is None else []
    pair = Pair.load(load) if options.pad_to is None else _padded(load, options)
    engine = pair.engine
    assert isinstance(engine, ReDrafter)
    prompts = encode(rows, pair.tokenizer, **options.cut)
    work = Workload.from_options(engine, pair.tokenizer, prompts, options, options.num_prompts)
    if suite is not None:
        require_template(pair.tokenizer, pair.name)
        questions = [question for some in suite.categories.values() for question in some]
        first = Dialogues(questions, pair.tokenizer, work.most_prompt_tokens).next_prompts()
        if not first:
            raise ArgumentError(
                f"--suite {asked.suite}: no question leaves room for --max-new-tokens {options.max_new_tokens} in the "
                f"{work.most_prompt_tokens + options.max_new_tokens} tokens of a text: lower it"
            )
        work = replace(work, prompts=first, ends=end_tokens(engine.model, pair.tokenizer))
    work.check()
    least, most = engine.shape.num_beams or 1, engine.target.vocab_size
    for ids in options.draft_vocab_sizes:
        if not least <= ids <= most:
            raise ArgumentError(f"--draft-vocab-sizes must be from num_beams={least} to {most} ids, got {ids}")
    at_once = max(engine.options.max_batch_size, *options.batch_sizes)  # do not split a large batch into several
    engine.options = replace(engine.options, max_batch_size=at_once)
    note = None if options.pad_to is None else describe(options.pad_to, Path(pair.name).name)
    prompts_name = asked.suite or options.prompts or SHIPPED_PROMPTS
    names = Names(model=pair.name, drafter=pair.drafting_model, prompts=prompts_name, padded=note)
    known = facts(work, names, asdict(load) | asdict(options))
    report = Report(known, path=options.json, note=note)
    report.line(*head(known))
    if suite is None:
        run_sections(report, work, options)
    else:
        report.line(str(suite), LEGEND)
        run_suite(report, work, suite, pair.tokenizer, options, [*head(known), str(suite)], asked)
    return report.finish()


def _read_suite(args: argparse.Namespace, asked: SuiteOptions, seed: int) -> Suite | None:
    """Return the selected questions of `--suite`; None without that option."""
    if asked.suite is None:
        return None
    # The default of --num-prompts applies to other prompts; a suite is measured on all its questions.
    return read_suite(asked.suite).choose(vars(args).get("num_prompts"), seed)


def _padded(load: LoadOptions, options: BenchOptions) -> Pair:
    """Load a small pair on the CPU, and pad it to the cost of a large model on the device."""
    assert options.pad_to is not None
    _, load, _ = check_options(load, NO_DRAFT_OPTIONS)
    # The small pair is only copied into the padded one, which is quantized afterwards.
    unquantized = replace(load, device="cpu", tuning="none", quantization=None, draft_quantization=None)
    pair, shape = Pair.load(unquantized), SHAPES[options.pad_to]
    device, small = str(load.device), pair.engine
    assert isinstance(small, ReDrafter)
    if not isinstance(small.drafter, RecurrentDrafter):
        raise UnsupportedError("--pad-to pads recurrent drafters alone, and this is none: leave it out")
    drafter = pad_drafter(
        small.drafter, shape.hidden_size, shape.vocab_size, head_rank=options.pad_head_rank, device=device
    )
    model = pad_model(small.model, shape, device=device)
    if load.quantization is not None:
        quantize_model(model, options.pad_to)
    if load.draft_quantization is not None:
        quantize_drafter(drafter)
    with unmasked(model):
        target = Target(model)
    typed = TreeShape(load.num_beams, load.draft_len_per_beam, load.node_budget)
    # A typed shape takes precedence over a tuned one.
    tuning = None if load.tuning == "none" or typed != TreeShape() else find_tuning(load.tuning, target, drafter)
    pair.engine = ReDrafter(target, drafter, small.shape, options=small.options, tuning=tuning)
    return pair


def _bench_servers(args: argparse.Namespace) -> int:
    if find_spec("aiohttp") is None:
        raise MissingDependencyError(f"--url needs aiohttp: {how_to_install('bench')}")
    from redrafter.bench.http_client import server_url
    from redrafter.bench.server_load import Load, find_server, run_server_loads
    from redrafter.bench.server_suite import ChatLoad, run_server_suite

    suite_options = read_options(SuiteOptions, args)
    suite_options.refuse_others(args, NOT_OF_SUITES)
    for item in (item for options in (BenchOptions, LoadOptions) for item in fields(options)):
        if item.name in args and item.name not in SERVER_OPTIONS:
            name = flag(("no_" if item.default is True else "") + item.name)
            hint = f", and {INSTEAD[item.name]}" if item.name in INSTEAD else ""
            raise ArgumentError(f"{name} has no meaning with --url: leave it out{hint}")
    options, asked = read_options(BenchOptions, args), read_options(ServerOptions, args)
    suite = _read_suite(args, suite_options, options.seed)
    prompts = [_prompt(row) for row in read_prompts(options.prompts)] if suite is None else []
    key = next(filter(None, (asked.api_key, *map(os.environ.get, KEY_VARIABLES))), None)
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ArgumentError("an API key must be of printable ASCII characters, without spaces")
    urls = list(map(server_url, asked.url))  # validate all of them before the first request
    servers = [asyncio.run(find_server(url, vars(args).get("model"), key)) for url in urls]
    # The document records the command line, which must not contain the API key.
    words = ["KEY" if asked.api_key and asked.api_key in word else word for word in sys.argv[1:]]
    typed = asdict(options) | asdict(asked) | {"api_key": None}
    command, used = shlex.join(["redrafter", *words]), versions()
    document: dict[str, object] = {
        "command": command,
        "servers": [
            {"url": server.url, "model": server.model, "kind": server.kind, "version": server.version}
            for server in servers
        ],
        "prompts": suite_options.suite or options.prompts or SHIPPED_PROMPTS,
        "client": f"{platform.machine()} CPU, {os.cpu_count()} cores, one process",
        "versions": {name: used[name] for name in ("redrafter", "python")},
        "options": {name: value for name, value in typed.items() if name in SERVER_OPTIONS or name in vars(asked)},
    }
    report = Report(document, path=options.json)
    report.line(command)
    for number, server in enumerate(servers, start=1):
        known = "".join(f", {fact}" for fact in (server.kind, server.version) if fact)
        report.line(f"server {number}: {server.url}, model {server.model}{known}")
    report.line(
        f"client: {document['client']}; {describe_versions({name: used[name] for name in ('redrafter', 'python')})}"
    )
    writing = f"temperature {options.temperature:g}, seed {options.seed} and up"
    if suite is not None:
        lines = [command, str(suite), f"{options.max_new_tokens} new tokens at most; {writing}"]
        report.line(*lines[1:], LEGEND)
        chats = ChatLoad((), options.max_new_tokens, options.temperature, options.seed)
        run_server_suite(report, servers, suite, chats, asked.concurrency, lines, suite_options)
        return report.finish()
    load = Load(prompts, options.max_new_tokens, options.temperature, options.seed)
    num_requests = {
        concurrency: asked.num_requests or max(options.num_prompts, MIN_REQUESTS_PER_SLOT * concurrency)
        for concurrency in asked.concurrency
    }
    report.line(
        f"{len(prompts)} prompts from {document['prompts']}; {load.max_new_tokens} new tokens, end of text ignored; "
        f"{writing}",
        "prompts come again, each time with another cache_salt: a server that knows it reuses nothing of earlier ones",
    )
    run_server_loads(report, servers, load, num_requests)
    return report.finish()


def _prompt(row: Row) -> str | dict[str, Any]:
    """Return what to send to a server: a text to continue, or the fields of a request to answer a chat."""
    if turns := turns_before_answer(row):
        return chat_fields(row, turns)
    prompt = row.prompt if row.prompt is not None else row.text
    if not prompt:
        raise ArgumentError(
            f"{row.where} has nothing to send to a server: with --url, rows need a prompt, a text, or messages with a "
            "turn of the user"
        )
    return prompt
