"""Replicas of a server on Ray Serve: which one answers a request, and which one continues when that one is lost."""

from functools import partial

from redrafter.extensions.replicas.launch import launch
from redrafter.extensions.replicas.options import ReplicaOptions
from redrafter.serve.extension import Extension, Launch


class ReplicasExtension(Extension):
    """Adds `--ray`, which serves with replicas in place of one server."""

    options = ReplicaOptions
    options_title = "replicas on Ray Serve"

    def launcher(self, options: ReplicaOptions) -> Launch | None:
        """Return what serves with replicas; None without `--ray`."""
        return partial(launch, options) if options.ray else None


EXTENSION = ReplicasExtension()
