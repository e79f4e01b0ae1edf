"""A server of a quantised model says so, in its log and its metrics."""

import pytest

from helpers.engine_in_thread import server_of
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions

SCHEMES = {None: (0, 0, ""), "fp8": (1, 0, ", FP8 weights"), "fp8_dynamic": (1, 1, ", FP8 weights and activations")}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_log_and_metrics_tell_the_scheme(scheme):
    weights, activations, words = SCHEMES[scheme]
    pair = Pair.load(LoadOptions(device="cpu", quantization=scheme))
    server = server_of(pair)
    assert f" on cpu{words}; " in server.engine.facts.description[0]
    metrics = server.metrics.text().decode().splitlines()
    for name, value in (("fp8_weights", weights), ("fp8_activations", activations)):
        (line,) = [line for line in metrics if line.startswith(f"redrafter:{name}{{")]
        assert float(line.split()[-1]) == value
