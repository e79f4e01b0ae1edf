"""On a GPU with FP8 arithmetic: a quantised base runs its own products in captured and compiled steps."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import tiny_drafter, tiny_model, uneven_batch
from helpers.quantized import save_compressed
from redrafter import ReDrafter
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.convert.convert_checkpoint import merge

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not CAPABLE, reason="needs a GPU of compute capability 8.9")

NEW = 40
HALF = {"dtype": "bfloat16", "device": "cuda", "kv_cache_free_gpu_memory_fraction": 0.1}


def optimized() -> dict[str, Any]:
    """Return the arguments of loading that ask for products in FP8."""
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(use_optimized_inference=True)}


def torchao() -> dict[str, Any]:
    """Return the arguments of loading that let torchao quantise the base."""
    pytest.importorskip("torchao")
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow
    from transformers import TorchAoConfig

    return {"quantization_config": TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))}


def as_it_is() -> dict[str, Any]:
    """Return no arguments: the base is loaded as it is saved."""
    return {}


WAYS = {
    "FP8_DYNAMIC": as_it_is,
    "FP8": as_it_is,
    "FP8_DYNAMIC, products in FP8": optimized,
    "FP8, products in FP8": optimized,
    "torchao": torchao,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Return a folder with a bfloat16 base and a drafter for it, neither of them quantised."""
    folder = tmp_path_factory.mktemp("plain")
    model = tiny_model("llama").to(torch.bfloat16)
    model.save_pretrained(folder / "base")
    norms = embedding_norms(model.get_input_embeddings())
    tiny_drafter(draft_beams=3, base_embedding_norms=norms).to(torch.bfloat16).save_pretrained(folder / "drafter")
    return folder


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_dynamic"])
@pytest.mark.parametrize("copies", [1, 24])
def test_a_base_that_is_quantised_at_loading_writes_its_best_tokens(plain, copies, scheme, compile):
    """Few tokens and many are multiplied in different ways."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*slower", UserWarning)  # a step that cannot be captured says so
        engine = ReDrafter.from_pretrained(
            plain / "base",
            plain / "drafter",
            quantization=scheme,
            draft_quantization=scheme,
            compile=compile,
            **HALF,
        )
        engine.model.generation_config.eos_token_id = None
        ids, mask = (each.repeat(copies, 1).cuda() for each in uneven_batch())
        assert largest_gap(engine, ids, mask) < 0.5
        sampled = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=True, top_k=0, seed=3)
    assert sampled.shape == (len(ids), ids.shape[1] + NEW)
    assert engine.model.model.layers[0].mlp.up_proj.weight.element_size() == 1
    assert engine.drafter.lm_head.weight.element_size() == 1
    steps = [step for running in engine.batches.idle for step in running.captured_steps.values()]
    assert steps
    assert all(step.graph is not None for step in steps)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return merged checkpoints of a quantised base and a bfloat16 drafter, by scheme."""
    made: dict[str, Path] = {}
    for scheme in ("FP8_DYNAMIC", "FP8", "torchao"):
        folder = tmp_path_factory.mktemp("fp8")
        model = tiny_model("llama").to(torch.bfloat16)
        table = model.get_input_embeddings()
        table.weight.data[0] = table.weight.data[1]  # padding is all zeros, by whose largest value torchao divides
        norms = embedding_norms(table)
        tiny_drafter(draft_beams=3, base_embedding_norms=norms).to(torch.bfloat16).save_pretrained(folder / "drafter")
        if scheme == "torchao":
            model.save_pretrained(folder / "base")  # and is quantised as it loads
        else:
            save_compressed(folder / "base", scheme, model)
        made[scheme] = merge(folder / "base", folder / "drafter", folder / "merged")
    return made


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
    folder, own = folders[way.split(",")[0]], WAYS[way]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = ReDrafter.from_pretrained(folder, compile=compile, **HALF, **own)
        engine.model.generation_config.eos_token_id = None
        ids, mask = (each.cuda() for each in uneven_batch())
        assert largest_gap(engine, ids, mask) < 0.5  # a token that was only guessed is some 2 off
        engine.generate(ids, mask, max_new_tokens=NEW, do_sample=True, top_k=0, seed=3)
    steps = [step for running in engine.batches.idle for step in running.captured_steps.values()]
    captured = all(step.graph is not None for step in steps)
    if own:
        assert engine.model.model.layers[0].mlp.up_proj.weight.element_size() == 1
        assert captured
    # What could not be captured, or compiled, was said.
    assert captured or any("cannot run in a CUDA graph" in str(each.message) for each in said)
