"""Which functions of drafters are given to torch.compile, with which options, and which of their sizes vary."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from helpers.dflash import random_block_drafter
from helpers.eagle import random_head
from helpers.models import DRAFTER_ALONE, paged, prompts_of, tiny_drafter, tiny_model
from helpers.mtp import FORMS, random_mtp
from redrafter import ReDrafter
from redrafter.cache.paged import PagedCache
from redrafter.drafting import block_drafter, drafter_model
from redrafter.model.layer_compiler import LayerCompiler
from redrafter.model.target import Target
from redrafter.tree.sizes import TreeShape

ALL_ROWS = "01 01 01"  # tokens, sources and carried states, whose rows and beams vary
FUSED = {"options": {"combo_kernels": True}}
# By drafter, the functions with their options and, of each kind of call, the dimensions of tensors that vary.
GIVEN: dict[str, dict[str, tuple[dict[str, Any], set[str]]]] = {
    "recurrent": {"_begin": ({}, {"0"}), "_advance": ({}, {"01 01 0 0 0", f"{ALL_ROWS} 0 0 0"})},
    "context": {
        "read_last": ({}, {"0"}),
        "_begin": ({}, {"0"}),
        "_remember": ({}, {"0 0 0"}),
        "_advance": ({}, {"01 01 0 0 03 02 03 0", f"{ALL_ROWS} 0 0 03 02 03 0"}),
    },
    "EAGLE-3": {
        "_finish": (FUSED, {"0 0 0"}),
        "_carry": (FUSED, {"0 0"}),
        "fuse_hidden": (FUSED, {"0"}),
        "_advance": (FUSED, {f"{ALL_ROWS} 0 - - 0 0 0", f"{ALL_ROWS} 0 012 - - 0 0 0"}),
    },
    "DFlash": {
        "_remember": ({}, {"- 0 0 0"}),
        "_fill_paged": ({"fullgraph": True, "backend": LayerCompiler}, {"0 0 0 - - 0 0 - - 0 0 -"}),
    },
    "MTP": {"remember": ({}, {"0 0 0"}), "_step": ({}, {"1 1 1 - - 0 0 0 0 0 0 0 0 0 0"})},
}


def marked(arguments: tuple[object, ...]) -> str:
    """Return the dimensions of each tensor that are marked to vary, in order, such as `01 0 -`."""
    leaves = [x for x in tree_leaves([x for x in arguments if not isinstance(x, nn.Module)]) if isinstance(x, Tensor)]
    found = (sorted(getattr(x, "_dynamo_weak_dynamic_indices", ())) for x in leaves)
    return " ".join("".join(map(str, dims)) or "-" for dims in found)


@pytest.fixture
def given(monkeypatch):
    """Record what is given to torch.compile, and run it uncompiled; entries are in pages, as on a GPU."""
    recorded: dict[str, tuple[dict[str, Any], set[str]]] = {}

    def compile(function: Any, **options: Any) -> Any:
        if "backend" in options:
            options["backend"] = type(options["backend"])
        calls = set[str]()
        recorded[function.__name__] = {key: x for key, x in options.items() if x is not None}, calls
        return lambda *arguments: calls.add(marked(arguments)) or function(*arguments)

    for module in ("block_drafter", "eagle"):
        monkeypatch.setattr(f"redrafter.drafting.{module}.reads_pages", lambda cache: isinstance(cache, PagedCache))
    made_once = drafter_model.compile_once, vars(block_drafter)["_compiled_fill"]
    for made in made_once:
        made.cache_clear()
    monkeypatch.setattr(torch, "compile", compile)
    yield recorded
    for made in made_once:
        made.cache_clear()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.variant] if name == "DFlash" else []) for name in GIVEN]
)
def test_drafters_give_the_compiler_functions_whose_rows_and_beams_vary(name, given, monkeypatch):
    target = Target(FORMS["mimo"].model() if name == "MTP" else tiny_model("llama"))
    drafter = {
        "recurrent": lambda: tiny_drafter(recurrence="gated"),
        "context": lambda: tiny_drafter(context_window=8, context_kv_heads=2, context_head_dim=8),
        "EAGLE-3": random_head,
        "DFlash": random_block_drafter,
        "MTP": lambda: random_mtp(target, FORMS["mimo"]),
    }[name]()
    proposer, layer = type(drafter).proposer, type(drafter).stored_layer
    monkeypatch.setattr(type(drafter), "proposer", lambda *arguments: proposer(*arguments[:-1], True))
    monkeypatch.setattr(type(drafter), "stored_layer", lambda self, target, _: layer(self, target, True))
    engine = paged(ReDrafter(target, drafter, TreeShape(3, 3, 10), options=DRAFTER_ALONE))
    engine.pauses = False
    engine.generate(*prompts_of([9, 3]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert given == GIVEN[name]
