"""A model with recurrent layers is compiled around its mixers, and writes what it writes uncompiled."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from helpers.generation import noted, same_undrafted
from helpers.models import new_pool, paged, uneven_batch
from helpers.recurrent import generated_alone, recurrent_model
from redrafter import PromptLookup
from redrafter.attention.tree_attention import tree_attention
from redrafter.model.varlen_forward import VarlenForward
from redrafter.scheduler.paged_memory import prepare

NEW = 16


@pytest.mark.variant  # compiles a model
@pytest.mark.parametrize("architecture", ["lfm2", "mamba2", "qwen3_next"])
def test_one_compiled_forward_serves_all_trees(architecture, monkeypatch):
    # What stands for the kernels on a CPU cannot be traced, but the reference can.
    monkeypatch.setattr("redrafter.attention.tree_attention._operator", lambda plan, device: tree_attention)
    model, counter, compile = recurrent_model(architecture), CompileCounter(), torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch, "compile", lambda run, fullgraph, backend: compile(run, fullgraph=fullgraph, backend=counter)
    )
    engine = paged(PromptLookup.from_pretrained(model))
    assert all(mixer.tokens_alone for mixer in engine.target.traits.mixers)
    engine.target.varlen_forward.compile()
    ids, mask = uneven_batch(rows=3)
    out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert torch.equal(out, generated_alone(model, ids, mask, NEW, eos_token_id=None))
    same_undrafted(engine, ids, mask, max_new_tokens=NEW, do_sample=True, seed=3)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("architecture", "compiled"), [("lfm2", True), ("zaya", False)])
def test_a_mixer_that_needs_more_than_its_tokens_keeps_the_forward_uncompiled(architecture, compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    asked = noted(monkeypatch, VarlenForward, "compile", lambda _, forward, compiled=True: compiled)
    engine = PromptLookup.from_pretrained(recurrent_model(architecture))
    asked.clear()
    prepare(engine.target, new_pool(engine, engine.target, 20), compile=True)
    assert asked == [compiled]
