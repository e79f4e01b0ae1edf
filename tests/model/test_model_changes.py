"""Models whose owner changes them after they are bound: what is written is what `model.generate` writes then."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from helpers.generation import ON_BOTH_CACHES
from helpers.models import paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.recurrent import generated_alone, recurrent_model
from redrafter import ArgumentError, PromptLookup, UnsupportedError
from redrafter.model.patch import ModelState

IDS, MASK = uneven_batch(rows=3, longest=40)  # longer than a block of the paged cache
GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def scaled(module, args, output):
    """Change what a layer returns, as a steering hook does."""
    return output * 1.5


def plain_text(model):
    """Return what `model.generate` writes of each row alone; a hybrid's text may depend on its padding."""
    return generated_alone(model, IDS, MASK, 12, min_new_tokens=12)


def check_followed(engine, change):
    """Change a model between two calls, and compare with what it writes itself before and after."""
    model = engine.model
    before = plain_text(model)
    assert torch.equal(engine.generate(IDS, MASK, **GREEDY), before)
    undo = change()
    try:
        after = plain_text(model)
        assert not torch.equal(after, before)
        for speculate in (True, False):
            assert torch.equal(engine.generate(IDS, MASK, speculate=speculate, **GREEDY), after)
    finally:
        if undo is not None:
            undo()
    if undo is not None:
        assert torch.equal(engine.generate(IDS, MASK, **GREEDY), before)


@ON_BOTH_CACHES
@pytest.mark.parametrize("layer", ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_a_forward_hook_is_called_whenever_it_was_registered(on, layer):
    model = tiny_model("llama")
    module = model.model.layers[1].get_submodule(layer)
    engine = on(with_tree(model, tiny_drafter(), 3, 3))
    check_followed(engine, lambda: module.register_forward_hook(scaled).remove)
    check_followed(engine, lambda: module.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,)).remove)
    with_hook = tiny_model("llama")
    with_hook.model.layers[1].get_submodule(layer).register_forward_hook(scaled)
    expected = plain_text(with_hook)
    assert torch.equal(on(with_tree(with_hook, tiny_drafter(), 3, 3)).generate(IDS, MASK, **GREEDY), expected)


@ON_BOTH_CACHES
def test_a_hook_on_all_modules_is_called(on):
    def scale_linear(module, args, output):
        return output * 1.2 if isinstance(module, nn.Linear) else None

    engine = on(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))
    check_followed(engine, lambda: nn.modules.module.register_module_forward_hook(scale_linear).remove)


@ON_BOTH_CACHES
@pytest.mark.parametrize("layer", ["in_proj_qkvz", "out_proj"])
def test_a_hook_on_an_outer_layer_of_a_mixer_is_called_once_a_token(on, layer):
    model = recurrent_model("qwen3_next")
    mixer = next(module for module in model.modules() if hasattr(module, "in_proj_qkvz"))
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    engine = on(with_tree(model, tiny_drafter(**sizes), 3, 3))
    check_followed(engine, lambda: mixer.get_submodule(layer).register_forward_hook(scaled).remove)


def query(model):
    return model.model.layers[1].self_attn.q_proj


def replace_parameter(model):
    query(model).weight = nn.Parameter(-query(model).weight.detach())


def wrap_weight_anew(model):
    query(model).weight = nn.Parameter(query(model).weight.data, requires_grad=False)


def replace_data(model):
    query(model).weight.data = -query(model).weight.data


def replace_all(model):
    model.load_state_dict({name: weight * 1.3 for name, weight in model.state_dict().items()}, assign=True)


def replace_forward(model):
    module = query(model)
    module.forward = lambda x: -nn.functional.linear(x, module.weight)
    return lambda: vars(module).pop("forward")


def write_in_place(model):
    with torch.no_grad():
        query(model).weight.mul_(-1)


@ON_BOTH_CACHES
@pytest.mark.parametrize(
    "change", [replace_parameter, replace_data, replace_all, replace_forward, write_in_place], ids=lambda x: x.__name__
)
def test_replaced_weights_and_forwards_are_followed(on, change):
    """The prompts are longer than a block, so keys of the old weights would be found in the prefix cache."""
    engine = on(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))
    check_followed(engine, lambda: change(engine.model))


def test_replaced_weights_are_fused_again_without_a_second_copy():
    engine = paged(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))
    replace_all(engine.model)
    engine.generate(IDS, MASK, **GREEDY)
    attention = engine.model.model.layers[0].self_attn
    shared = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == shared
    other = paged(PromptLookup.from_pretrained(engine.model))  # fuses what is fused already
    assert attention.q_proj.weight.untyped_storage().data_ptr() == shared
    revision = engine.target.revision
    for each in (other, engine, other, engine):
        assert torch.equal(each.generate(IDS, MASK, **GREEDY), plain_text(engine.model))
    assert engine.target.revision == revision


def test_weights_that_are_written_in_place_keep_the_captured_steps_and_not_the_prefixes():
    engine = paged(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))
    engine.generate(IDS, MASK, **GREEDY)
    (batch,), blocks = engine.batches.idle, engine.memory.blocks
    steps = dict(batch.captured_steps)
    assert steps
    assert blocks.roots
    write_in_place(engine.model)
    engine.generate(IDS[:1, :3], **GREEDY)  # too short to be found again
    assert not blocks.roots
    assert batch in engine.batches.idle
    assert steps.items() <= batch.captured_steps.items()
    replace_data(engine.model)
    engine.generate(IDS, MASK, **GREEDY)
    assert batch not in engine.batches.idle


def test_an_unchanged_model_keeps_what_was_kept():
    engine = paged(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))
    engine.generate(IDS, MASK, **GREEDY)
    (batch,) = engine.batches.idle
    steps = dict(batch.captured_steps)
    recording = {"output_hidden_states": True, "return_dict_in_generate": True}  # leaves hooks of transformers
    engine.model.generate(IDS, attention_mask=MASK, **recording, **GREEDY)
    assert any(module._forward_hooks for module in engine.model.modules())
    engine.generate(IDS, MASK, **GREEDY)
    assert engine.batches.idle == [batch]
    assert batch.captured_steps == steps
    assert engine.target.revision == (0, 0, 0)


def register_hook(model):
    return query(model).register_forward_hook(scaled).remove


def register_hook_on_all(model):
    return nn.modules.module.register_module_forward_pre_hook(lambda module, args: None).remove


def patch_class(model):
    kind, forward = type(query(model)), type(query(model)).forward
    kind.forward = lambda self, x: -forward(self, x)
    return lambda: setattr(kind, "forward", forward)


def change_class(model):
    query(model).__class__ = type(model.model.layers[1].mlp)  # whose forward is called elsewhere too


def replace_child(model):
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 32, bias=False)


def swap_children(model):
    attention = model.model.layers[1].self_attn
    attention.q_proj, attention.o_proj = attention.o_proj, attention.q_proj


def move_child(model):
    """Give the last child of a module to the next one as its first: the same modules in the same order."""
    first, second = model.model.layers[1].self_attn, model.model.layers[1].mlp
    name, child = first._modules.popitem()
    second._modules = {f"moved_{name}": child, **second._modules}


def remove_child(model):
    del model.model.layers[1].self_attn.q_proj


def add_child(model):
    query(model).adapter = nn.Linear(2, 2)


def replace_table(model):
    query(model).__dict__["_parameters"] = {"weight": nn.Parameter(-query(model).weight.detach())}


def write_buffer(model):
    query(model).scale.add_(1)


def replace_buffer(model):
    query(model).scale = torch.ones(1)


def compile_layer(model):
    query(model).compile(backend="eager")


CHANGES = [
    *(replace_parameter, replace_data, replace_all, replace_forward, write_in_place, register_hook, patch_class),
    *(register_hook_on_all, change_class, replace_child, swap_children, move_child, remove_child, add_child),
    *(wrap_weight_anew, replace_table, write_buffer, replace_buffer, compile_layer),
]


@pytest.mark.parametrize("inference", [False, True], ids=["", "made in inference mode"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__)
def test_a_look_tells_of_every_change(change, inference):
    if inference and change in (write_in_place, write_buffer):
        pytest.skip("weights that were made in inference mode do not count what is written to them")
    with torch.inference_mode(inference):
        model = deepcopy(tiny_model("llama"))
        query(model).register_buffer("scale", torch.zeros(1))
        state = ModelState.from_model(model)
    assert state.again() == state == ModelState.from_model(model)
    undo = change(model)
    assert state.again() != state
    if undo is not None:
        undo()
        assert state.again() == state


def test_a_look_tells_of_other_adapters_of_peft():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    model = peft.get_peft_model(deepcopy(tiny_model("llama")), lora).eval()
    model.add_adapter("other", lora)
    state = ModelState.from_model(model)
    with model.disable_adapter():
        assert state.again() != state
    assert state.again() == state
    model.set_adapter("other")
    assert state.again() != state


def test_a_look_passes_over_what_changes_in_forwards_and_sees_one_module_in_training_mode():
    model = deepcopy(tiny_model("llama"))
    state = ModelState.from_model(model)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 2
    model(IDS)
    for training in (False, True, False):
        query(model).train(training)
        assert state.again() == state
        assert state.again().training == training


ANOTHER = {
    "half": (lambda model: model.half(), "LlamaForCausalLM was changed from float32 to float16"),
    "bfloat16": (lambda model: model.bfloat16(), "from float32 to bfloat16"),
    "double": (lambda model: model.double(), "from float32 to float64"),
    "moved": (lambda model: model.to("meta"), "moved from cpu to meta"),
    "resized": (lambda model: model.resize_token_embeddings(120).eval(), "97 ids to 120"),
    "head": (lambda model: model.set_output_embeddings(nn.Linear(32, 97).eval()), "another output embedding"),
    "embedding": (lambda model: model.set_input_embeddings(nn.Embedding(97, 32).eval()), "another input embedding"),
}


@ON_BOTH_CACHES
@pytest.mark.parametrize(("change", "said"), ANOTHER.values(), ids=ANOTHER)
def test_a_model_that_was_made_another_one_needs_a_new_engine(on, change, said):
    engine = on(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))
    engine.generate(IDS, MASK, **GREEDY)
    change(engine.model)
    with pytest.raises(ArgumentError, match=f"{said}.*make a new engine"):
        engine.generate(IDS, MASK, **GREEDY)


@pytest.mark.parametrize("how", ["whole", "method", "forward", "layers"])
def test_a_compiled_model_is_bound_and_decoded_as_it_was_before(how):
    model, calls = tiny_model("llama"), []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    expected = plain_text(model)
    given = torch.compile(model, backend=backend) if how == "whole" else model
    if how == "forward":
        model.forward = torch.compile(model.forward, backend=backend)
    for module in {"method": [model], "layers": model.model.layers}.get(how, []):
        module.compile(backend=backend)
    for on in (lambda engine: engine, paged):
        assert torch.equal(on(with_tree(given, tiny_drafter(), 3, 3)).generate(IDS, MASK, **GREEDY), expected)
    assert not calls
    given(IDS)
    assert calls  # its owner's own calls are compiled as before


def test_a_model_without_weights_is_refused():
    with pytest.raises(UnsupportedError, match="meta device"):
        with_tree(tiny_model("llama").to("meta"), tiny_drafter(), 3, 3)
