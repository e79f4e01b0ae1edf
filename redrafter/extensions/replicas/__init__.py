"""Run replicas of a server on Ray Serve."""

from functools import partial

from redrafter.extensions.replicas.options import ReplicaOptions
from redrafter.serve.extension import Extension, Launch


class ReplicasExtension(Extension):
    """Adds `--ray`, which serves with replicas instead of a single server."""

    options = ReplicaOptions
    options_title = "replicas on Ray Serve"

    def launcher(self, options: ReplicaOptions) -> Launch | None:
        """Return the function that serves with replicas; None without `--ray`."""
        if not options.ray:
            return None
        from redrafter.extensions.replicas.launch import launch

        return partial(launch, options)


EXTENSION = ReplicasExtension()
