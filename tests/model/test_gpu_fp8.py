"""On a GPU with FP8 arithmetic: a quantised base runs its own products in captured and compiled steps."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CompressedTensorsConfig, TorchAoConfig

from helpers.command_line import merge
from helpers.models import tiny_drafter, tiny_model, uneven_batch
from helpers.quantized import save_compressed
from redrafter import ReDrafter
from redrafter.checkpoints.drafters import embedding_norms

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not CAPABLE, reason="needs a GPU of compute capability 8.9")

NEW = 40
HALF = {"dtype": "bfloat16", "device": "cuda", "kv_cache_free_gpu_memory_fraction": 0.1}


def optimized() -> Any:
    """Return a config that asks for products in FP8."""
    return CompressedTensorsConfig(use_optimized_inference=True)


def torchao() -> Any:
    """Return a config that lets torchao quantise the base."""
    pytest.importorskip("torchao")
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    return TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))


WAYS = {  # None: the base is loaded as it is saved
    "FP8_DYNAMIC": None,
    "FP8": None,
    "FP8_DYNAMIC, products in FP8": optimized,
    "FP8, products in FP8": optimized,
    "torchao": torchao,
}


def save_pair(folder: Path, scheme: str | None = None) -> Path:
    """Save a bfloat16 base, quantised in a scheme of compressed-tensors or not, and a drafter for it."""
    model = tiny_model("llama").to(torch.bfloat16)
    table = model.get_input_embeddings()
    table.weight.data[0] = table.weight.data[1]  # padding is all zeros, by whose largest value torchao divides
    drafter: Any = tiny_drafter(draft_beams=3, base_embedding_norms=embedding_norms(table.weight))
    drafter.to(torch.bfloat16).save_pretrained(folder / "drafter")
    if scheme is None:
        model.save_pretrained(folder / "base")
    else:
        save_compressed(folder / "base", scheme, model)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return save_pair(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Return merged checkpoints of a quantised base and a bfloat16 drafter, by scheme; torchao's as it loads."""
    made: dict[str, Path] = {}
    for scheme in ("FP8_DYNAMIC", "FP8", "torchao"):
        folder = save_pair(tmp_path_factory.mktemp("fp8"), None if scheme == "torchao" else scheme)
        made[scheme] = merge(folder / "base", folder / "drafter", folder / "merged")
    return made


def captured(engine: ReDrafter) -> bool:
    """Tell whether all steps of an engine were captured."""
    steps = [step for running in engine.batches.idle for step in running.captured_steps.values()]
    assert steps
    return all(step.graph is not None for step in steps)


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("copies", [1, 24])
def test_a_base_that_is_quantised_at_loading_writes_its_best_tokens(plain, copies, compile):
    """Few tokens and many are multiplied in different ways."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*slower", UserWarning)  # a step that cannot be captured says so
        schemes = {"quantization": "fp8", "draft_quantization": "fp8"}
        engine = ReDrafter.from_pretrained(plain / "base", plain / "drafter", compile=compile, **schemes, **HALF)
        engine.model.generation_config.eos_token_id = None
        ids, mask = (each.repeat(copies, 1).cuda() for each in uneven_batch())
        assert largest_gap(engine, ids, mask) < 0.5
        sampled = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=True, top_k=0, seed=3)
    assert sampled.shape == (len(ids), ids.shape[1] + NEW)
    assert engine.model.model.layers[0].mlp.up_proj.weight.element_size() == 1
    assert engine.drafter.lm_head.weight.element_size() == 1
    assert captured(engine)


def largest_gap(engine: ReDrafter, ids: torch.Tensor, mask: torch.Tensor) -> float:
    """Return how far the tokens of a greedy text are from the best ones of one plain forward.

    The unit is the standard deviation of that forward's logits.
    """
    text = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    whole = torch.cat([mask, torch.ones_like(text[:, mask.shape[1] :])], dim=1)
    with torch.no_grad():
        logits = engine.model(text, attention_mask=whole).logits[:, mask.shape[1] - 1 : -1].float()
    own = logits.gather(2, text[:, mask.shape[1] :, None])[..., 0]
    return float(((logits.amax(-1) - own) / logits.std(-1)).max())


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("way", WAYS)
def test_an_fp8_base_writes_its_best_tokens(folders, way, compile):
    """Texts agree up to the rounding of activations, which depends on the shape of a forward."""
    folder, config = folders[way.split(",")[0]], WAYS[way]
    own = {} if config is None else {"quantization_config": config()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = ReDrafter.from_pretrained(folder, compile=compile, **HALF, **own)
        engine.model.generation_config.eos_token_id = None
        ids, mask = (each.cuda() for each in uneven_batch())
        assert largest_gap(engine, ids, mask) < 0.5  # a token that was only guessed is some 2 off
        engine.generate(ids, mask, max_new_tokens=NEW, do_sample=True, top_k=0, seed=3)
    if own:
        weight = engine.model.model.layers[0].mlp.up_proj.weight
        assert getattr(weight, "qdata", weight).element_size() == 1  # torchao's tensor has the size of its dtype before
        assert captured(engine)
    # What could not be captured, or compiled, was said.
    assert captured(engine) or any("cannot run in a CUDA graph" in str(each.message) for each in said)
