"""Launch `redrafter serve --ray` once its options are read, without importing torch."""

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from redrafter.app.program import import_libraries
from redrafter.errors import ArgumentError
from redrafter.extensions.replicas.options import NOT_OPERATED, ReplicaOptions
from redrafter.parallel.launched import launched_processes
from redrafter.serve.network.api_keys import OPERATOR_KEY_VARIABLE, ApiKeys

if TYPE_CHECKING:
    from redrafter.serve.engine_process.start import LoadEngine

_LOG = logging.getLogger("redrafter.serve")


def launch(replicas: ReplicaOptions, request: "LoadEngine", keys: ApiKeys, operators: ApiKeys) -> None:
    """Serve a model with replicas; raise `ArgumentError` for operators' keys, since replicas cannot be operated."""
    from redrafter.serve.command import address, listen

    options, load = request.options, request.load
    if launched_processes() > 1:
        raise ArgumentError("each replica is one engine on one GPU: start `redrafter serve --ray` without torchrun")
    if operators:
        raise ArgumentError(f"{NOT_OPERATED} (--operator-key, {OPERATOR_KEY_VARIABLE})")
    with listen(options) as listening:  # check the address first: the proxy's own error is less clear
        url, port = address(options, listening), listening.getsockname()[1]
    _LOG.info("on %s; loading %s on Ray Serve", url, load.model or "the pair in the box")
    ready = partial(_LOG.info, "ready on %s", url)
    application = import_libraries("redrafter.extensions.replicas.application")
    application.serve_replicas(replace(options, port=port), load, request.draft, replicas, keys, ready)
