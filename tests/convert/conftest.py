"""Bases and drafters to convert."""

from pathlib import Path

import pytest

from helpers.conversion import apple_dir, convert
from helpers.models import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("bases") / "llama"
    tiny_model("llama").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    """Return a folder with bases that TensorRT-LLM's format can hold."""
    folder = tmp_path_factory.mktemp("bases")
    for name, model_type, changes in (
        ("llama", "llama", {}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
        ("biased", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
        ("scaled", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}),
    ):
        tiny_model(model_type, **changes).save_pretrained(folder / name)
    return folder


@pytest.fixture
def apple(tmp_path) -> Path:
    return apple_dir(tmp_path / "apple")


@pytest.fixture
def pair(bases, apple) -> dict[str, Path]:
    return {"base": bases / "llama", "drafter": apple}


@pytest.fixture
def trtllm(pair, tmp_path) -> Path:
    """The pair as a checkpoint of TensorRT-LLM, for two ranks."""
    return convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=2)
