"""A base that drafters are converted for."""

from pathlib import Path

import pytest

from helpers.models import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("bases") / "llama"
    tiny_model("llama").save_pretrained(place)
    return place
