"""The temperature of each row, among the processors that transformers prepared."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from redrafter.errors import ArgumentError
from redrafter.sampling.hf_processors import TemperaturePerRow, index_of_warpers
from redrafter.sampling.processors import ProcessorOfRows, RowTemperature

__all__ = ["temperature_divisor", "with_temperature"]


def with_temperature(
    processors: LogitsProcessorList, temperature: Any, rows: int, *, sampled: bool
) -> list[LogitsProcessor]:
    """Return the processors with a temperature by row where transformers puts its own.

    Sampling at temperature 1, for which transformers makes no processor, gets one too, which changes no score: it is
    then of one kind with sampling at other temperatures, and shares captured steps. Greedy decoding is given none.

    Args:
        processors: What transformers prepared.
        temperature: One value, or one per output row, in place of the config's; None for the config's.
        rows: Number of output rows.
        sampled: Whether tokens are sampled.
    """
    if temperature is not None:
        _check_temperatures(temperature, rows)
    given = list(processors)
    for processor in given:
        if isinstance(processor, TemperaturePerRow):
            _check_temperatures(processor.temperature, rows)
    if not sampled:
        given = [processor for processor in given if not isinstance(processor, TemperaturePerRow)]
    kinds = (TemperatureLogitsWarper, TemperaturePerRow)
    places = [index for index, processor in enumerate(given) if type(processor) in kinds]
    if temperature is not None and places:
        given[places[0]] = TemperaturePerRow(temperature)
    elif sampled and not places:
        values = torch.ones(rows) if temperature is None else temperature
        given.insert(index_of_warpers(given), TemperaturePerRow(values))
    return given


def temperature_divisor(processors: Sequence[ProcessorOfRows], rows: int, device: torch.device) -> Tensor:
    """Return what scores are divided by altogether, `[B]` float32."""
    divisor = torch.ones(rows, device=device)
    for processor in processors:
        if isinstance(processor, RowTemperature):
            divisor = divisor * processor.temperature
    return divisor


def _check_temperatures(temperature: Any, rows: int) -> None:
    values = torch.as_tensor(temperature, dtype=torch.float64)
    if values.shape != (rows,) or not bool((values > 0).all()):
        raise ArgumentError(
            f"temperature must be positive, one value or one per output row ({rows}); got {temperature}"
        )
