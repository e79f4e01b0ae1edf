"""Change a running engine for rollouts: sleep, new weights, another drafter."""

from redrafter.serve.extension import Extension


class RolloutsExtension(Extension):
    """Adds `/v1/sleep`, `/v1/wake`, `/v1/update_weights` and `/v1/drafter`, for operators."""

    route_maker = f"{__name__}.routes:rollout_routes"


EXTENSION = RolloutsExtension()
