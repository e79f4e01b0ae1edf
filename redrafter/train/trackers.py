"""Experiment trackers, through accelerate."""

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from accelerate import Accelerator

from redrafter.errors import ArgumentError
from redrafter.train.config import TrainConfig

__all__ = ["start_trackers", "tracker_arguments"]


def tracker_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of `Accelerator` that name the trackers. Raises `ArgumentError` if one is not installed."""
    for name in config.report_to:
        if find_spec(name) is None:
            raise ArgumentError(f"--report-to {name} needs its package: pip install {name}")
    return {"log_with": list(config.report_to), "project_dir": f"{config.output}.logs"} if config.report_to else {}


def start_trackers(config: TrainConfig, accelerator: Accelerator) -> None:
    """Start the trackers, with the options of this run."""
    if config.report_to:
        options = {
            name: value if isinstance(value, int | float | bool) else str(value)
            for name, value in asdict(config).items()
        }
        accelerator.init_trackers("redrafter", config=options)
