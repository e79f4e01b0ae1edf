"""`redrafter serve`: an OpenAI-compatible server."""

import argparse
import json
import logging
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from redrafter.app.engines import PLAIN, can_draft, draft_shape
from redrafter.app.flags import add_options, read_options, short_name
from redrafter.app.loading import Pair
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.app.parser import Parser
from redrafter.app.program import run_command
from redrafter.app.templates import read_template
from redrafter.engine.draft_target import DraftTarget
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.files.dtype_names import dtype_name
from redrafter.serve.config import LIMIT_OPTIONS, ServeOptions, config_beside, read_config
from redrafter.serve.network.api_keys import KEY_VARIABLE, ApiKeys, collect_keys

__all__ = ["Server", "build_parser", "main"]

_LOG = logging.getLogger("redrafter.serve")


@dataclass
class Server:
    """A loaded model and its proposer, with the worker and the application that serve them.

    Attributes:
        pair: Model, tokenizer and engine.
        options: How the server listens, and how much it serves at once.
        load: How the model was loaded.
        keys: API keys that clients must send.
        name: Name of the model that clients use.
        worker: Runs the scheduler.
        app: The ASGI application.
    """

    pair: Pair
    options: ServeOptions
    load: LoadOptions
    keys: ApiKeys = field(default_factory=ApiKeys)

    def __post_init__(self) -> None:
        from redrafter.scheduler.cuda_graphs import MOST_ROWS
        from redrafter.scheduler.scheduler import Scheduler
        from redrafter.serve.metrics import Metrics
        from redrafter.serve.network.access import AccessPolicy
        from redrafter.serve.routes.app import create_app
        from redrafter.serve.service import Service
        from redrafter.serve.worker import Worker

        engine = self.pair.engine
        if isinstance(engine, DraftTarget) and engine.adaptive:
            raise ArgumentError("a server drafts at one length: leave out --adaptive")
        self.name = self.options.served_model_name or short_name(self.pair.name)
        limits = self.options.limits(self.load.max_seq_len)
        min_rows = MOST_ROWS if engine.target.device.type == "cuda" else 1  # a GPU has memory for prefixes too
        rows = max(limits.max_batch_size, min_rows)
        graphs = engine.make_graphs(rows)
        scheduler = Scheduler(engine, graphs, limits, self.options.speculate)
        metrics = Metrics(scheduler, self.name)
        self.worker = Worker(scheduler, metrics.observe)
        options = self.options
        service = Service(
            self.worker,
            self.pair.tokenizer,
            self.name,
            metrics,
            special_tokens_in_content=options.special_tokens_in_content,
            reasoning=options.reasoning_format == "auto",
        )
        policy = AccessPolicy.of(
            self.keys, options.host, options.allowed_hosts, options.allowed_origins, options.open_metrics
        )
        self.app = create_app(service, policy, options.max_body_size)

    def warm_up(self) -> None:
        """Compile kernels and capture steps on a GPU, which the first requests would else wait for."""
        if self.options.warm_up and self.pair.engine.target.device.type == "cuda":
            from redrafter.serve.warm_up import warm_up

            _LOG.info("compiling kernels and capturing steps; --no-warm-up leaves that to the first requests")
            warm_up(self.worker.scheduler)

    def summary(self, listening: socket.socket) -> list[str]:
        """Return log lines that say what is served, with a command to try it."""
        url = address(self.options, listening)
        target, scheduler = self.pair.engine.target, self.worker.scheduler
        proposer = self.pair.engine.proposer_for(1) if self.options.speculate else None
        drafts = "no drafts"
        if proposer is not None and self.pair.method != PLAIN:
            drafts = f"{self.pair.method}, {draft_shape(proposer) or 'no drafts at one row'}"
        key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if self.keys else ""
        body = f'{{"model": "{self.name}", "prompt": "Once upon a time", "max_tokens": 40}}'
        return [
            f"{self.name}: {target.name}, {dtype_name(target.dtype)} on {target.device}; {drafts}",
            f"up to {self.options.max_batch_size} texts at once, of up to {scheduler.longest} tokens; "
            f"{scheduler.graphs.blocks.num_blocks * 16:,} tokens of keys and values",
            f"ready on {url}; try",
            f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        ]


def address(options: ServeOptions, listening: socket.socket) -> str:
    """Return the URL of a server on a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def listen(options: ServeOptions) -> socket.socket:
    """Return a bound socket.

    Raises:
        ArgumentError: Host or port cannot be used; the message names the option.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio sends small packets at once only on a socket of protocol TCP; else a first token may wait 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        flag = "--port" if error.errno in (13, 98, 48) else "--host"
        raise ArgumentError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another {flag}"
        ) from error
    return listening


def build_parser() -> Parser:
    """Build the parser of `redrafter serve`."""
    parser = Parser(
        prog="redrafter serve",
        description="Serve a model over OpenAI's protocol: /v1/completions, /v1/chat/completions, /v1/responses,\n"
        "/v1/models, /tokenize, /health, /metrics, /docs. Without MODEL, the pair in the box.",
        epilog="examples:\n"
        "  redrafter serve my-merged --port 8000\n"
        "  redrafter serve my-base --drafter my-drafter --max-batch-size 64 --api-key-file keys.txt\n"
        "  redrafter serve my-70b --draft-model my-1b",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="options as JSON or JSON5, also the keys of TensorRT-LLM's runtime.json; flags win (may be repeated)",
    )
    parser.add_argument("--print-config", action="store_true", help="print all options as JSON and do nothing")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="hub id or directory of the model, or merged checkpoint"
    )
    add_options(parser, ServeOptions, "serving")
    add_options(parser, LoadOptions, "loading", without=("model",))
    add_options(parser, DraftOptions, "drafting without a drafter")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `redrafter serve`, and return its exit code."""

    def run() -> int:
        args = _with_config(build_parser().parse_args(argv))
        options, load = read_options(ServeOptions, args), read_options(LoadOptions, args)
        draft = read_options(DraftOptions, args)
        if args.print_config:
            print(json.dumps(_shown(options) | asdict(load) | asdict(draft), indent=2))
            return 0
        _check_dependencies()
        return _serve(options, load, draft)

    return run_command(run)


def _with_config(args: argparse.Namespace) -> argparse.Namespace:
    """Add the options of configuration files: flags win over `--config`, and these over files beside the model."""
    kinds = (ServeOptions, LoadOptions, DraftOptions)
    configured = read_config(args.config, kinds)
    given = {name: value for name, value in vars(args).items() if not (name == "model" and value is None)}
    model = (configured | given).get("model")
    beside = {} if model is None else read_config(config_beside(model), kinds, only=LIMIT_OPTIONS)
    return argparse.Namespace(**beside | configured | given)


def _load(options: ServeOptions, load: LoadOptions, draft: DraftOptions, template: str | None) -> Pair:
    """Load the model and its proposer, and warn if there is none. template: chat template instead of the model's."""
    speculate = options.speculate and can_draft(load, draft)
    if options.speculate and not speculate:
        _LOG.warning(
            "%s comes without a drafter, so texts are written plainly: --drafter D, --draft-model D or --prompt-lookup "
            "makes it faster",
            load.model,
        )
    pair = Pair.load(load, draft, speculate)
    if template is not None:
        pair.tokenizer.chat_template = template
    return pair


def _serve(options: ServeOptions, load: LoadOptions, draft: DraftOptions) -> int:
    from redrafter.serve.log import start_logging
    from redrafter.serve.network.server_process import ServerProcess

    start_logging(options.log_format, options.log_level)

    def start() -> Server:
        began = time.monotonic()
        pair = _load(options, load, draft, template)
        _LOG.info("loaded %s in %.1f s", pair.name, time.monotonic() - began)
        server = Server(pair, options, load, keys)
        server.warm_up()
        return server

    def ready(server: Server) -> None:
        for line in server.summary(listening):
            _LOG.info(line)

    try:
        keys = collect_keys(options.api_key, options.api_key_file)
        template = read_template(options.chat_template) if options.chat_template else None
        with listen(options) as listening:
            process = ServerProcess(options, listening)
            _LOG.info("on %s; loading %s", address(options, listening), load.model or "the pair in the box")
            process.run(start, ready)
    except ReDrafterError as error:
        _LOG.error("%s", " ".join(str(error).split()))
        return 2
    return 0


def _shown(options: ServeOptions) -> dict[str, Any]:
    """Return the options as `--config` reads them, without API keys."""
    shown = asdict(options)
    if shown.pop("api_key"):
        print("redrafter: the API keys are not shown", file=sys.stderr)
    return shown


def _check_dependencies() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ArgumentError(f"{', '.join(missing)} is missing: pip install 'redrafter[serve]'")


if __name__ == "__main__":
    sys.exit(main())
