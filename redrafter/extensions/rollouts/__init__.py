"""Change a running engine for rollouts: sleep, new weights, another drafter."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from redrafter.serve.extension import Extension, Respond

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from redrafter.serve.server import Server


class RolloutsExtension(Extension):
    """Adds `/v1/sleep`, `/v1/wake`, `/v1/update_weights` and `/v1/drafter`."""

    def routes(self, server: "Server", respond: Respond) -> "Sequence[BaseRoute]":
        """Return the routes, which are for operators."""
        from redrafter.extensions.rollouts.routes import rollout_routes

        return rollout_routes(server)


EXTENSION = RolloutsExtension()
