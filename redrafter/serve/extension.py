"""The interface of extensions: packages that add routes and flags to the server.

An extension is a module with an `EXTENSION`, an instance of a subclass of `Extension`. The server finds extensions in
the package `redrafter.extensions`, and through entry points `redrafter.extensions` of other packages; it imports none
by name.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING, Any

from redrafter.errors import ArgumentError, first_line

if TYPE_CHECKING:
    from fastapi.responses import Response
    from starlette.routing import BaseRoute

    from redrafter.serve.engine_process.start import LoadEngine
    from redrafter.serve.network.api_keys import ApiKeys
    from redrafter.serve.protocol.requests import ApiError
    from redrafter.serve.server import Server

WRITING_PATHS = ("/v1/chat/completions", "/v1/completions")  # of OpenAI's protocol; extensions add their own
GROUP = "redrafter.extensions"  # the package that is searched, and the entry points of others
Respond = Callable[..., "Awaitable[Response]"]  # `respond` of `redrafter.serve.routes.app`
Launch = Callable[["LoadEngine", "ApiKeys", "ApiKeys"], None]  # arguments: what to load, clients' keys, operators' keys


@dataclass(frozen=True)
class NoOptions:
    """The options of an extension without flags."""


class Extension:
    """Base of extensions of the server. A subclass overrides the hooks that it needs; the defaults add nothing.

    `redrafter serve --help` imports the module of each extension, so it imports neither torch nor FastAPI: the methods
    import them.

    Attributes:
        options: Dataclass whose fields are flags of `redrafter serve`, for `launcher`.
        options_title: Their heading in `--help`.
        protocol_path: Path prefix whose errors `format_error` formats; None for OpenAI's format.
        writing_paths: Paths of generation requests, which have a `seed`.
        key_header: Header in which its clients send their key, in addition to `Authorization`; None for no other.
        cors_headers: Other headers of its clients, which pages of `--allowed-origins` may send.
        route_maker: Function that makes its routes, as `module:function`; it has the arguments of `routes`.
    """

    options: type = NoOptions
    options_title = ""
    protocol_path: str | None = None
    writing_paths: tuple[str, ...] = ()
    key_header: str | None = None
    cors_headers: tuple[str, ...] = ()
    route_maker: str | None = None

    def launcher(self, options: Any) -> Launch | None:
        """Return a function that replaces this process's server, or None. `options` has the type `self.options`."""
        return None

    def routes(self, server: "Server", respond: Respond) -> "Sequence[BaseRoute]":
        """Return the routes of a server: each a `JsonRoute`, for clients, or an `OperatorRoute`, for operators.

        `respond` sends a dictionary or a stream, and cancels the work when the client disconnects.
        """
        return () if self.route_maker is None else resolve_name(self.route_maker)(server, respond)

    def format_error(self, error: "ApiError") -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an error at `protocol_path`."""
        raise NotImplementedError


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions of this package, sorted by name, then extensions from entry points.

    Raises `ArgumentError` for an entry point that names no module with an `EXTENSION`.
    """
    package = find_spec(GROUP)
    assert package is not None
    folders = package.submodule_search_locations or ()
    found: list[Extension] = [import_module(f"{GROUP}.{module.name}").EXTENSION for module in iter_modules(folders)]
    for entry_point in entry_points(group=GROUP):
        try:
            found.append(import_module(entry_point.module).EXTENSION)
        except (ImportError, AttributeError) as error:
            raise ArgumentError(
                f"the entry point {entry_point.name} = {entry_point.value} of {GROUP} names no module with an "
                f"EXTENSION ({first_line(error)}): correct or uninstall its package"
            ) from error
    return tuple(found)


def writing_paths() -> tuple[str, ...]:
    """Return the paths of generation requests, which have a `seed`: OpenAI's, then those of extensions."""
    return (*WRITING_PATHS, *(path for extension in extensions() for path in extension.writing_paths))


def key_headers() -> tuple[str, ...]:
    """Return the headers in which extensions' clients send their key, in addition to `Authorization`."""
    return tuple(extension.key_header for extension in extensions() if extension.key_header is not None)


def protocol_at(path: str) -> Extension | None:
    """Return the extension whose protocol a path belongs to; None for OpenAI's."""
    protocols = (extension for extension in extensions() if extension.protocol_path is not None)
    return next((each for each in protocols if f"{path}/".startswith(f"{each.protocol_path}/")), None)
