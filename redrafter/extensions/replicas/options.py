"""Define the options of `redrafter serve --ray`, and reject server options that replicas do not support."""

from dataclasses import dataclass, fields, replace

from redrafter.app.flags import flag
from redrafter.errors import ArgumentError, how_to_install
from redrafter.options import option
from redrafter.serve.config import ServeOptions


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of `redrafter serve --ray`: number of replicas, and resources of each."""

    ray: bool = option(False, f"serve replicas of the model on Ray Serve: {how_to_install('serve,ray')}")
    ray_address: str | None = option(
        None,
        "Ray cluster to serve on (default: that of the environment's RAY_ADDRESS, else the one that runs on this "
        "machine, else a new one on this machine)",
        metavar="ADDRESS",
    )
    num_replicas: int | None = option(None, "replicas, each with a copy of the model (default: 1)")
    min_replicas: int | None = option(None, "fewest replicas, where --max-replicas lets their number follow the load")
    max_replicas: int | None = option(None, "most replicas (default: as many as --num-replicas, whatever the load)")
    target_ongoing_requests: float | None = option(
        None,
        "requests per replica above which others take some, and more replicas are started (default: --max-batch-size)",
    )
    upscale_delay_s: float = option(30.0, "seconds of too many requests before replicas are added")
    downscale_delay_s: float = option(600.0, "seconds of too few requests before replicas are ended")
    num_cpus: float = option(1.0, "CPU cores that Ray sets aside for a replica")
    num_gpus: float | None = option(
        None, "GPUs that Ray gives to a replica (default: 1 where the cluster has any, 0 with --device cpu)"
    )
    num_routers: int = option(1, "processes that hand requests to replicas")

    def __post_init__(self) -> None:
        if not self.ray:
            given = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
            if given:
                raise ArgumentError(f"{flag(given[0])} is for replicas: add --ray")
        for name, least in (("num_replicas", 1), ("min_replicas", 0), ("max_replicas", 1), ("num_routers", 1)):
            if getattr(self, name) is not None and not least <= getattr(self, name) <= 4096:
                raise ArgumentError(f"{flag(name)} must be from {least} to 4096, got {getattr(self, name)}")
        for name in ("upscale_delay_s", "downscale_delay_s", "num_cpus", "num_gpus"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 86400:
                raise ArgumentError(f"{flag(name)} must be from 0 to 86400, got {getattr(self, name):g}")
        if self.target_ongoing_requests is not None and not 0 < self.target_ongoing_requests <= 1e6:
            raise ArgumentError(
                f"--target-ongoing-requests must be above 0 and at most 1e6, got {self.target_ongoing_requests:g}"
            )
        if self.min_replicas is not None and self.max_replicas is None:
            raise ArgumentError("--min-replicas needs --max-replicas; for a fixed number give --num-replicas alone")
        if self.num_replicas is not None and self.max_replicas is not None:
            raise ArgumentError("give --num-replicas, or --min-replicas and --max-replicas, not both")
        if self.max_replicas is not None and self.max_replicas < (
            1 if self.min_replicas is None else self.min_replicas
        ):
            raise ArgumentError(f"--max-replicas {self.max_replicas} is below --min-replicas {self.min_replicas}")


NOT_OPERATED = (
    "an operator's key is for changing one server while it runs, and a replica that is started later would know "
    "nothing of it: leave it out, or start servers without --ray"
)


def check_replicated(options: ServeOptions) -> ServeOptions:
    """Return the server options to pass to replicas, without the API keys themselves.

    Raises `ArgumentError` for an option that replicas do not support.
    """
    if options.allow_runtime_lora_updating:
        raise ArgumentError(
            "--allow-runtime-lora-updating changes one server, and a replica that is started later would know nothing "
            "of it: give adapters to all replicas with --lora-modules"
        )
    if options.operator_key:
        raise ArgumentError(f"{NOT_OPERATED} (--operator-key)")
    if options.max_connections is not None:
        raise ArgumentError("--max-connections has no meaning with --ray, whose own proxy accepts connections")
    # The router checks keys, so replicas need none.
    return replace(options, api_key=(), api_key_file=None)
