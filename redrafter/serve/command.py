"""`redrafter serve`: an OpenAI-compatible server."""

import argparse
import json
import logging
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import add_options, read_options, short_name
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.app.parser import Parser
from redrafter.app.program import run_command
from redrafter.app.templates import find_template, read_template
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.serve.config import LIMIT_OPTIONS, ServeOptions, config_beside, read_config
from redrafter.serve.engine_process.client import EngineClient
from redrafter.serve.engine_process.messages import EngineFacts, LoadEngine
from redrafter.serve.engine_process.start import EngineProcess
from redrafter.serve.network.api_keys import KEY_VARIABLE, ApiKeys, collect_keys

__all__ = ["Server", "build_parser", "main"]

_LOG = logging.getLogger("redrafter.serve")


@dataclass
class Server:
    """The application that answers requests with the texts of an engine.

    Attributes:
        engine: The line to the engine.
        tokenizer: The model's tokenizer.
        options: How the server listens, and how much it serves at once.
        keys: API keys that clients must send.
        name: Name of the model that clients use.
        app: The ASGI application.
    """

    engine: EngineClient
    tokenizer: PreTrainedTokenizerBase
    options: ServeOptions
    keys: ApiKeys = field(default_factory=ApiKeys)

    def __post_init__(self) -> None:
        from redrafter.serve.metrics import Metrics
        from redrafter.serve.network.access import AccessPolicy
        from redrafter.serve.routes.app import create_app
        from redrafter.serve.service import Service

        options = self.options
        self.name = options.served_model_name or short_name(self.engine.facts.model)
        metrics = Metrics(self.engine, self.name)
        self.engine.on_delta = metrics.observe
        service = Service(
            self.engine,
            self.tokenizer,
            self.name,
            metrics,
            special_tokens_in_content=options.special_tokens_in_content,
            reasoning=options.reasoning_format == "auto",
        )
        policy = AccessPolicy.of(
            self.keys, options.host, options.allowed_hosts, options.allowed_origins, options.open_metrics
        )
        self.app = create_app(service, policy, options.max_body_size)

    def summary(self, listening: socket.socket) -> list[str]:
        """Return log lines that say what is served, with a command to try it."""
        url = address(self.options, listening)
        what, *more = self.engine.facts.description
        key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if self.keys else ""
        body = f'{{"model": "{self.name}", "prompt": "Once upon a time", "max_tokens": 40}}'
        return [
            f"{self.name}: {what}",
            *more,
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


def _load_tokenizer(facts: EngineFacts, load: LoadOptions, template: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an engine's model.

    Args:
        facts: What the engine has said of itself.
        load: How the model was loaded.
        template: Chat template instead of the model's.
    """
    tokenizer = load_tokenizer(facts.model, trust_remote_code=load.trust_remote_code)
    find_template(tokenizer, facts.model)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _serve(options: ServeOptions, load: LoadOptions, draft: DraftOptions) -> int:
    from redrafter.serve.log import start_logging
    from redrafter.serve.network.server_process import ServerProcess

    start_logging(options.log_format, options.log_level)

    def start() -> Server:
        process = EngineProcess()
        facts = process.load(LoadEngine(options, load, draft))
        tokenizer = _load_tokenizer(facts, load, template)
        return Server(EngineClient(process.channel, facts, process), tokenizer, options, keys)

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
