"""`redrafter serve`: an OpenAI-compatible server."""

import argparse
import json
import logging
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from redrafter.app.config_file import ConfigParser, command_parser
from redrafter.app.drafter_alone import use_base_of_drafter
from redrafter.app.flags import read_options
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.app.paths import check_adapter, check_paths
from redrafter.app.program import import_libraries, run_command
from redrafter.app.rank_launcher import run_on_ranks
from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError, how_to_install
from redrafter.parallel.launched import process_rank
from redrafter.serve.config import ServeOptions, parse_lora_modules
from redrafter.serve.engine_process.start import EngineProcess, LoadEngine
from redrafter.serve.extension import extensions
from redrafter.serve.network.api_keys import ApiKeys, collect_keys, collect_operator_keys

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from redrafter.serve.server import Server

_LOG = logging.getLogger("redrafter.serve")


def address(options: ServeOptions, listening: socket.socket) -> str:
    """Return the URL of a server on a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def listen(options: ServeOptions) -> socket.socket:
    """Return a bound socket, or raise `ArgumentError` with the option that cannot be used."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the socket's protocol is TCP; otherwise a first token may wait 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        # EACCES and EADDRINUSE on Linux and macOS concern the port, other errors the address.
        flag = "--port" if error.errno in (13, 98, 48) else "--host"
        message = f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another {flag}"
        raise ArgumentError(message) from error
    return listening


def build_parser() -> ConfigParser:
    """Build the parser of `redrafter serve`."""
    added = [(extension.options, extension.options_title, ()) for extension in extensions()]
    drafting = (DraftOptions, "drafting without a drafter", ())
    parser = command_parser(
        "redrafter serve", (ServeOptions, "serving", ()), (LoadOptions, "loading", ("model",)), drafting, *added
    )
    parser.add_argument("--print-config", action="store_true", help="print all options as JSON and do nothing")
    model = "hub id, directory or GGUF file of the model, a merged checkpoint, or a drafter that names its base"
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=model)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `redrafter serve`, and return its exit code."""

    def serve_model() -> int:
        args, request, added = read_request(argv)
        options, load, draft = request.options, request.load, request.draft
        if args.print_config:
            shown = {name: value for group in (load, draft, *added, options) for name, value in asdict(group).items()}
            # Printed options end up in logs and issues.
            if any([shown.pop("api_key"), shown.pop("operator_key")]):
                print("redrafter: the API keys are not shown", file=sys.stderr)
            print(json.dumps(shown, indent=2))
            return 0
        if sys.platform == "win32":
            raise UnsupportedError("redrafter serve needs signals and sockets of Unix: start it in WSL")
        check_paths(options, load, draft, *added)
        for path in parse_lora_modules(options.lora_modules).values():
            check_adapter(path, "--lora-modules")
        # Checked before the model loads, which may take minutes.
        needed = ("fastapi", "uvicorn", "httptools", "prometheus_client")
        missing = [name for name in needed if find_spec(name) is None]
        if missing:
            raise ArgumentError(f"{', '.join(missing)} is missing: {how_to_install('serve')}")
        if options.otlp_traces_endpoint is not None:
            from redrafter.serve.traces import Traces

            Traces(options.otlp_traces_endpoint).close()  # report missing packages before a model is loaded
        launchers = (extension.launcher(group) for extension, group in zip(extensions(), added, strict=True))
        launch = next(filter(None, launchers), _serve)
        words = ["serve", *(sys.argv[1:] if argv is None else argv)]
        if launch is _serve and (of_ranks := run_on_ranks(load.tensor_parallel_size, words)) is not None:
            return of_ranks
        # Only the first rank serves HTTP; the others repeat its steps.
        if process_rank() > 0 and launch is _serve:
            worker = import_libraries("redrafter.serve.engine_process.worker")
            return int(worker.follow(request))
        from redrafter.serve.log import start_logging

        start_logging(options.log_format, options.log_level)
        try:
            keys = collect_keys(options.api_key, options.api_key_file)
            operators = collect_operator_keys(options.operator_key, keys)
            launch(request, keys, operators)
        except ReDrafterError as error:
            _LOG.error("%s", " ".join(str(error).split()))
            return 2
        return 0

    return run_command(serve_model)


def read_request(argv: Sequence[str] | None) -> tuple[argparse.Namespace, LoadEngine, list[Any]]:
    """Read a command line, and return its arguments, what to load, and the options of each extension."""
    parser = build_parser()
    args = parser.parse_args(argv)
    use_base_of_drafter(args)
    options, load = read_options(ServeOptions, args), read_options(LoadOptions, args)
    request = LoadEngine(options, load, read_options(DraftOptions, args))  # validates the combination of options
    return args, request, [read_options(extension.options, args) for extension in extensions()]


def _serve(request: LoadEngine, keys: ApiKeys, operators: ApiKeys) -> None:
    from redrafter.serve.capture import prepare_folder

    def start() -> "tuple[Server, ASGIApp]":
        module = import_libraries("redrafter.serve.server")  # import torch while the engine's process does the same
        from redrafter.serve.routes.app import server_app

        server: Server = module.load_server(engine, options, request.load, keys, operators)
        return server, server_app(server)

    def ready(server: "Server") -> None:
        for line in server.summary(url):
            _LOG.info(line)

    options = request.options
    if options.capture is not None:
        prepare_folder(options.capture)  # report errors before the model loads
    # Listen first, so that a port in use is reported before the model loads and probes get an answer meanwhile.
    with listen(options) as listening, closing(EngineProcess(request)) as engine:
        from redrafter.serve.network.server_process import ServerProcess  # takes a third of a second to import

        url = address(options, listening)
        process = ServerProcess(options, listening)
        _LOG.info("on %s; loading %s", url, request.load.model or "the pair in the box")
        process.serve_until_signal(start, ready)


if __name__ == "__main__":
    sys.exit(main())
