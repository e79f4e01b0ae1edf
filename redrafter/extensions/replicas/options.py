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
        "Ray cluster to serve on (default: RAY_ADDRESS of the environment, else the cluster that runs on this "
        "machine, else a new one)",
        metavar="ADDRESS",
    )
    num_replicas: int | None = option(None, "replicas, each with a copy of the model (default: 1)")
    min_replicas: int | None = option(None, "minimum number of replicas, if --max-replicas enables autoscaling")
    max_replicas: int | None = option(
        None, "maximum number of replicas; enables autoscaling (default: a fixed number, --num-replicas)"
    )
    target_ongoing_requests: float | None = option(
        None,
        "running requests per replica above which requests go to others, and replicas are added (default: "
        "--max-batch-size)",
    )
    upscale_delay_s: float = option(30.0, "seconds of load above the target before replicas are added")
    downscale_delay_s: float = option(600.0, "seconds of load below the target before replicas are removed")
    num_cpus: float = option(1.0, "CPU cores that Ray reserves for a replica")
    num_gpus: float | None = option(None, "GPUs of a replica (default: 1 if the cluster has GPUs, 0 with --device cpu)")
    num_routers: int = option(1, "processes that route requests to replicas")

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
    "an operator's key allows changes of a running server, which replicas that start later would not "
    "have: leave it out, or start servers without --ray"
)


def check_replicated(options: ServeOptions) -> ServeOptions:
    """Return the server options to pass to replicas, without the API keys themselves.

    Raises `ArgumentError` for an option that replicas do not support.
    """
    if options.allow_runtime_lora_updating:
        raise ArgumentError(
            "--allow-runtime-lora-updating changes a running server, and replicas that start later would not have the "
            "change: give adapters to all replicas with --lora-modules"
        )
    if options.operator_key:
        raise ArgumentError(f"{NOT_OPERATED} (--operator-key)")
    if options.max_connections is not None:
        raise ArgumentError("--max-connections has no meaning with --ray, whose own proxy accepts connections")
    # The router checks keys, so replicas need none.
    return replace(options, api_key=(), api_key_file=None)
