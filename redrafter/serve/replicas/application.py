"""The import path of Ray Serve's configurations: `import_path: redrafter.serve.replicas.application:app`.

It is an alias, since released versions had this path, and the only module of the server that names an extension.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Build the application as `redrafter.extensions.replicas.application.app` does."""
    return import_module("redrafter.extensions.replicas.application").app(args)
