"""Which values the fields have that a request omits."""

import pytest

pytest.importorskip("fastapi")

from redrafter.app.options import LoadOptions
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.engine import ServedEngine


@pytest.mark.parametrize(
    ("own", "of_checkpoint", "temperature"),
    [
        ({"temperature": 0.2, "top_p": 0.9, "do_sample": True}, None, 0.2),
        ({"temperature": 0.2, "do_sample": False}, None, 0.0),
        ({"temperature": 0.2, "do_sample": True}, False, 0.0),  # `greedy_search` of a merged checkpoint comes first
        ({"do_sample": False}, True, 1.0),
        ({"temperature": 0.0}, None, 0.0),
        ({}, None, 1.0),
    ],
)
def test_omitted_fields_have_the_values_of_the_models_generation_config(
    loaded, monkeypatch, own, of_checkpoint, temperature
):
    for name, value in own.items():
        monkeypatch.setattr(loaded.engine.model.generation_config, name, value)
    monkeypatch.setattr(loaded.engine, "do_sample", of_checkpoint)
    found = ServedEngine.from_pair(loaded, ServeOptions(), LoadOptions()).facts.sampling
    assert (found["temperature"], found["top_p"], found["top_k"]) == (temperature, own.get("top_p", 1.0), 0)
