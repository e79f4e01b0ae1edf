"""Provide the import path of Ray Serve configurations: `import_path: redrafter.serve.replicas.application:app`.

It is an alias for the path of released versions, and the only module of the server that names an extension.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Call `redrafter.extensions.replicas.application.app` to build the application."""
    return import_module("redrafter.extensions.replicas.application").app(args)
