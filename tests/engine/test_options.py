"""Options of engines: each value that cannot be is refused by its name, with what may stand there."""

from dataclasses import dataclass

import pytest

from redrafter import ArgumentError
from redrafter.engine.options import EngineOptions
from redrafter.options import option, whole

# What the error says of a field, and values that it cannot have.
WRONG: dict[str, tuple[str, list[object]]] = {
    "batch_invariant": ("batch_invariant must be True or False", [1, None, "yes"]),
    "kv_cache_dtype": (
        "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, got",
        ["int8", "FP8", "", None, 8],
    ),
    "max_batch_size": ("max_batch_size must be a positive integer", [0, -1, 1.5, True, "8"]),
    "kv_host_cache_gib": (
        r"kv_host_cache_gib must be from 0 to the machine's memory, \d+ GiB",
        [-1.0, float("nan"), 1e9, float("inf"), True, "8", None],
    ),
    "max_seq_len": ("max_seq_len", [1, 10**30]),
    "max_prefix_states": ("max_prefix_states must be an integer of 0 or more, got -1", [-1]),
    "max_input_len": ("max_input_len", ["many"]),
    "kv_cache_free_gpu_memory_fraction": ("kv_cache_free_gpu_memory_fraction", [0.0, "0.5", True]),
    "compile": ("compile", ["no"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_cannot_be_is_refused(name):
    message, values = WRONG[name]
    for value in values:
        with pytest.raises(ArgumentError, match=message):
            EngineOptions(**{name: value})


def test_an_option_of_a_feature_is_checked_by_its_own_declaration():
    @dataclass(frozen=True)
    class WithSteering(EngineOptions):
        steering: int = option(0, "steps of steering", check=whole(0))

    assert WithSteering(steering=3).steering == 3
    with pytest.raises(ArgumentError, match="steering must be an integer of 0 or more, got -1"):
        WithSteering(steering=-1)
    with pytest.raises(ArgumentError, match="max_loras must be a positive integer, got 0"):
        WithSteering(max_loras=0)
