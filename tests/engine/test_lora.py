"""Texts with LoRA adapters: each is what PEFT's own model with that adapter writes, whatever is written beside it."""

import json
import threading
from functools import partial
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.adapters import adapted, saved
from helpers.generation import ON_BOTH_CACHES
from helpers.models import VOCAB, in_threads, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import (
    ArgumentError,
    CheckpointError,
    DraftTarget,
    Engine,
    MismatchError,
    PromptLookup,
    ReDrafter,
    UnsupportedError,
)
from redrafter.attention import tree_attention
from redrafter.model import prompt_reader

IDS, MASK = uneven_batch(rows=4)
GREEDY = {"max_new_tokens": 16, "do_sample": False}
SAMPLED = {"max_new_tokens": 16, "do_sample": True, "seed": 3}
MIXED = ["one", None, "two", "one"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """PEFT's models with two adapters, by name, and their directories."""
    folder = tmp_path_factory.mktemp("adapters")
    two = {"r": 8, "target_modules": ["q_proj", "o_proj", "down_proj"], "use_rslora": True}
    return {"one": saved(folder / "one"), "two": saved(folder / "two", seed=2, **two)}


def make_engine(adapters, **options):
    engine = with_tree(tiny_model("llama"), tiny_drafter(), 3, 3)
    for name, (_, path) in adapters.items():
        engine.load_adapter(name, path)
    return engine


def plain_text(model, ids=IDS, mask=MASK):
    """Return what `model.generate` itself writes."""
    return model.generate(input_ids=ids, attention_mask=mask, **GREEDY)


def check_rows(found, adapters, names=MIXED, base=None, ids=IDS, mask=None):
    """Check each row against PEFT's model of its adapter, or the model without any."""
    mask = MASK if ids is IDS else torch.ones_like(ids) if mask is None else mask
    models = {None: base or tiny_model("llama")} | {name: model for name, (model, _) in adapters.items()}
    for row, name in enumerate(names):
        expected = plain_text(models[name], ids[row : row + 1], mask[row : row + 1])[0]
        assert torch.equal(found[row, : len(expected)], expected), name


@ON_BOTH_CACHES
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"]}),
        ("qwen3", {"target_modules": "all-linear"}),
        ("gemma2", {"target_modules": r".*\.(q_proj|down_proj)"}),
        ("gpt_neox", {"target_modules": ["query_key_value"]}),
        ("deepseek_v3", {"target_modules": ["q_a_proj", "o_proj"]}),
        ("llama", {"rank_pattern": {"q_proj": 7, "layers.1.mlp.*": 3}, "alpha_pattern": {r"model.layers.0.*proj": 3}}),
        ("llama", {"use_rslora": True, "r": 6}),
        ("llama", {"layers_to_transform": [1], "lora_dropout": 0.4}),
        ("llama", {"init_lora_weights": "gaussian", "exclude_modules": ["k_proj"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_an_adapter_may_be(on, tmp_path, architecture, changes):
    model, path = saved(tmp_path / "adapter", architecture, **changes)
    engine = on(with_tree(tiny_model(architecture), tiny_drafter(), 3, 3))
    engine.load_adapter("it", path)
    names = ["it", None, "it", "it"]
    found = engine.generate(IDS, MASK, adapter=names, **GREEDY)
    check_rows(found, {"it": (model, path)}, names, tiny_model(architecture))
    assert not torch.equal(found[0], engine.generate(IDS, MASK, **GREEDY)[0])


def test_weights_may_be_in_the_older_format(tmp_path, adapters):
    model, _ = adapters["one"]
    model.save_pretrained(tmp_path / "old", safe_serialization=False)
    if (tmp_path / "old" / "adapter_model.safetensors").is_file():  # newer versions of PEFT write no other
        file = tmp_path / "old" / "adapter_model.safetensors"
        torch.save(load_file(file), file.with_suffix(".bin"))
        file.unlink()
    engine = make_engine({"one": (model, tmp_path / "old")})
    check_rows(engine.generate(IDS, MASK, adapter=MIXED[:1] * 4, **GREEDY), adapters, MIXED[:1] * 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: PromptLookup.from_pretrained(tiny_model("llama"), draft_len=3, **more),
        lambda **more: DraftTarget.from_pretrained(tiny_model("llama"), tiny_model("gpt2"), draft_len=3, **more),
        lambda **more: ReDrafter.from_pretrained(tiny_model("llama"), tiny_drafter(), **more),
    ],
    ids=["lookup", "draft model", "drafter"],
)
def test_adapters_are_loaded_when_an_engine_is_made(make, adapters):
    engine = make(adapters={name: path for name, (_, path) in adapters.items()}, max_loras=2, max_lora_rank=8)
    assert engine.adapters == ["one", "two"]
    check_rows(engine.generate(IDS, MASK, adapter=MIXED, **GREEDY), adapters)
    check_rows(engine.generate(IDS, MASK, adapter="two", **GREEDY), adapters, ["two"] * 4)


def test_a_model_with_an_adapter_may_be_drafted_for_by_itself_without(adapters):
    model = tiny_model("llama")
    engine = DraftTarget.from_pretrained(model, model, draft_len=3)
    engine.load_adapter("one", adapters["one"][1])
    check_rows(engine.generate(IDS, MASK, adapter=["one", None] * 2, **GREEDY), adapters, ["one", None] * 2)


@ON_BOTH_CACHES
@pytest.mark.parametrize("masks", [True, False], ids=["chunks", "pieces"])
def test_prompts_that_are_read_in_parts_are_read_with_their_adapters(on, masks, adapters, monkeypatch):
    monkeypatch.setattr(prompt_reader, "MAX_FORWARD_TOKENS", 17)
    engine = on(make_engine(adapters))
    if masks:
        engine.target.prompt_reader.masks = True
    else:
        engine.target.prompt_reader.masks_on_dense = False
    ids, mask = uneven_batch(longest=30)
    check_rows(engine.generate(ids, mask, adapter=MIXED, **GREEDY), adapters, ids=ids, mask=mask)


def test_a_prefix_of_an_adapter_that_is_gone_is_not_reused_by_another_of_its_name(adapters):
    engine = paged(make_engine({"one": adapters["one"]}))
    ids = torch.randint(3, VOCAB, (1, 50), generator=torch.Generator().manual_seed(5))
    engine.generate(ids, adapter="one", **GREEDY)
    engine.unload_adapter("one")
    engine.load_adapter("one", adapters["two"][1])
    expected = plain_text(adapters["two"][0], ids, torch.ones_like(ids))
    assert torch.equal(engine.generate(ids, adapter="one", **GREEDY), expected)


def test_a_slot_that_was_given_to_another_adapter_keeps_nothing_of_the_first(adapters, tmp_path):
    engine = make_engine(adapters)
    small = saved(tmp_path / "small", seed=6, r=1, target_modules=["v_proj"])
    engine.unload_adapter("two")
    engine.load_adapter("small", small[1])
    check_rows(engine.generate(IDS, MASK, adapter=["small", "one"] * 2, **GREEDY), adapters | {"small": small},
               ["small", "one"] * 2)  # fmt: skip


def test_several_texts_of_a_prompt_share_its_adapter(adapters):
    engine = make_engine(adapters)
    settings = SAMPLED | {"num_return_sequences": 2}
    found = engine.generate(IDS[:2], MASK[:2], adapter=["one", None], **settings)
    apart = [engine.generate(IDS[:2], MASK[:2], adapter=name, **settings) for name in ("one", None)]
    assert torch.equal(found, torch.cat([apart[0][:2], apart[1][2:]]))


def test_engines_on_one_target_share_its_adapters_and_leave_nothing_on_the_model(adapters):
    engine = make_engine(adapters)
    modules, expected = dict(engine.model.named_modules()), plain_text(tiny_model("llama"))
    other = Engine(engine.target, engine.undrafted)
    assert other.adapters == ["one", "two"]
    check_rows(other.generate(IDS, MASK, adapter=MIXED, **GREEDY), adapters)
    custom = engine.custom_generate(adapter=MIXED)
    found = engine.model.generate(input_ids=IDS, attention_mask=MASK, custom_generate=custom, **GREEDY)
    check_rows(found, adapters)
    assert dict(engine.model.named_modules()) == modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules.values())
    assert torch.equal(plain_text(engine.model), expected)


def test_the_model_in_another_thread_has_no_adapter(adapters):
    engine = make_engine(adapters)
    expected = plain_text(tiny_model("llama"))

    def write(index):
        if index:
            return engine.generate(IDS, MASK, adapter="one", **GREEDY)
        return torch.stack([plain_text(engine.model) for _ in range(2)])

    for _ in range(2):
        plain, found = in_threads(write, 2)
        assert torch.equal(plain, torch.stack([expected] * 2))
        check_rows(found, adapters, ["one"] * 4)


def test_an_adapter_that_is_unloaded_while_a_text_is_written_stays_until_its_end(adapters):
    engine = ReDrafter.from_pretrained(tiny_model("llama"), tiny_drafter(), max_loras=1)
    engine.load_adapter("one", adapters["one"][1])
    refusals = []

    class Unload:
        def put_step(self, row, tokens, accepted, ended):
            if engine.adapters:
                engine.unload_adapter("one")
                with pytest.raises(ArgumentError, match="sequences of 1 that were unloaded continue") as refusal:
                    engine.load_adapter("two", adapters["two"][1])
                refusals.append(refusal)

        def end(self):
            pass

    check_rows(engine.generate(IDS, MASK, adapter="one", streamer=Unload(), **GREEDY), adapters, ["one"] * 4)
    assert len(refusals) == 1
    engine.load_adapter("two", adapters["two"][1])
    check_rows(engine.generate(IDS, MASK, adapter="two", **GREEDY), adapters, ["two"] * 4)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("three", "no adapter 'three' is loaded, but 'one', 'two'"),
        (["one", "three", None, None], "no adapter 'three'"),
        (["one"], "adapter has 1 entries for 4 prompts"),
        (3, "a name, or a list of a name or None for each prompt, got 3"),
        ([3] * 4, "a name, or a list"),
    ],
)
def test_adapters_that_are_not_there_are_refused(adapter, message, adapters):
    engine = make_engine(adapters)
    with pytest.raises(ArgumentError, match=message):
        engine.generate(IDS, MASK, adapter=adapter, **GREEDY)
    engine.unload_adapter("one")
    engine.unload_adapter("two")  # nothing is held any more
    with pytest.raises(ArgumentError, match="no adapter 'two'"):
        engine.unload_adapter("two")


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ({}, "one", "'one' is loaded already: unload it first"),
        ({"max_loras": 1}, "two", r"room for 1 adapters, and 1 are loaded: unload one, or raise max_loras"),
        ({"max_lora_rank": 4}, "two", r"rank 8, and there is room for rank 4: raise max_lora_rank \(--max-lora-rank\)"),
        ({}, "", "the name of an adapter must be"),
    ],
)
def test_adapters_without_room_are_refused(options, name, message, adapters):
    engine = PromptLookup.from_pretrained(tiny_model("llama"), **options)
    engine.load_adapter("one", adapters["one"][1])
    with pytest.raises(ArgumentError, match=message):
        engine.load_adapter(name, adapters["two"][1])
    assert engine.adapters == ["one"]


def test_batch_invariance_and_adapters_exclude_each_other(adapters):
    invariant = PromptLookup.from_pretrained(tiny_model("llama"), batch_invariant=True)
    with pytest.raises(UnsupportedError, match=r"batch_invariant=True .* merge_and_unload\(\), or leave out"):
        invariant.load_adapter("one", adapters["one"][1])
    with pytest.raises(UnsupportedError, match="batch_invariant=True"):
        make_engine(adapters).target.make_batch_invariant()


def change_tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, file)


def change_config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def on_layers(architecture, *layers, only_lora=False):
    """Return what writes an adapter of these layers into a folder."""

    def write(folder):
        saved(folder, architecture, target_modules=list(layers))
        if only_lora:
            change_tensors(folder, lambda name, x: None if "base_layer" in name else x)

    return write


# What is done to a directory with a fine adapter, how it is refused, and which model it was to be loaded for.
MORE_THAN_LORA = [
    ({"peft_type": "LOHA"}, "a LOHA adapter, and only LORA"),
    ({"bias": "lora_only"}, "bias='lora_only'"),
    ({"use_dora": True}, "use_dora=True, which is more than LoRA on linear layers; merge it"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\], which"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters="),
    ({"trainable_token_indices": [5]}, "trainable_token_indices="),
    ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"some_newer_field": {"a": 1}}, "some_newer_field="),
]
OTHER_LAYERS = [
    (on_layers("llama", "lm_head", "q_proj"), UnsupportedError, "holds base_model.model.lm_head.base", "llama"),
    (
        on_layers("llama", "lm_head", "q_proj", only_lora=True),
        UnsupportedError,
        "changes lm_head, the model's head; merge it",
        "llama",
    ),
    (on_layers("llama", "embed_tokens"), UnsupportedError, "not a LoRA weight of a linear layer", "llama"),
    (on_layers("gpt2", "c_attn"), MismatchError, "has no layer transformer.h.0.attn.c_attn", "llama"),
    (
        lambda folder: adapted(model=tiny_model("llama", hidden_size=16)).save_pretrained(folder),
        MismatchError,
        "reads 16 numbers and writes 48; in LlamaForCausalLM it reads 32",
        "llama",
    ),
    # It reads what the cache holds.
    (on_layers("deepseek_v3", "kv_b_proj"), UnsupportedError, "kv_b_proj does not read each token once", "deepseek_v3"),
]
NOT_WHOLE = [
    (lambda folder: folder.joinpath("adapter_config.json").unlink(), "has no adapter_config.json"),
    (lambda folder: folder.joinpath("adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    (lambda folder: folder.joinpath("adapter_model.safetensors").write_bytes(b"no"), "cannot be read"),
    (lambda folder: folder.joinpath("adapter_config.json").write_text("{"), "is not JSON"),
    (lambda folder: change_tensors(folder, lambda name, x: x / 0), "not finite"),
    (lambda folder: change_tensors(folder, lambda name, x: None if "lora_B" in name else x), "has no base_model"),
    (lambda folder: change_tensors(folder, lambda name, x: x[:1]), "cannot be multiplied"),
    (lambda folder: change_tensors(folder, lambda name, x: None), "holds no weights"),
    (lambda folder: change_config(folder, r=3), "weights of rank 4 .* says 3"),
    (lambda folder: change_config(folder, lora_alpha="8"), "no number lora_alpha"),
    (lambda folder: change_config(folder, rank_pattern={"(": 4}), "is not a regular expression"),
    (lambda folder: rmtree(folder), "is not a directory"),
]
REFUSED = [(partial(change_config, **fields), UnsupportedError, said, "llama") for fields, said in MORE_THAN_LORA]
REFUSED += OTHER_LAYERS + [(change, (CheckpointError, ArgumentError), said, "llama") for change, said in NOT_WHOLE]


@pytest.mark.parametrize(
    ("change", "error", "message", "architecture"), REFUSED, ids=[said for _, _, said, _ in REFUSED]
)
def test_adapters_that_are_more_than_lora_or_not_whole_are_refused_by_name(
    change, error, message, architecture, tmp_path
):
    adapted().save_pretrained(tmp_path / "it")
    change(tmp_path / "it")
    engine = PromptLookup.from_pretrained(tiny_model(architecture))
    with pytest.raises(error, match=message):
        engine.load_adapter("it", tmp_path / "it")
    assert engine.adapters == []


def test_threads_may_load_adapters_while_others_write(adapters):
    engine, done = make_engine({"one": adapters["one"]}), threading.Event()

    def work(index):
        if index:
            found = [engine.generate(IDS, MASK, adapter="one", **GREEDY) for _ in range(2)]
            done.set()
            return torch.stack(found)
        while not done.is_set():
            engine.load_adapter("two", adapters["two"][1])
            engine.unload_adapter("two")
        return IDS

    for found in in_threads(work, 2)[1]:
        check_rows(found, adapters, ["one"] * 4)


@pytest.mark.slow
def test_a_compiled_forward_is_compiled_once_with_adapters_and_once_without(adapters, monkeypatch):
    monkeypatch.setattr(tree_attention, "_operator", lambda plan, device: tree_attention.tree_attention)  # a GPU's
    engine, compiled, compile = paged(make_engine({"two": adapters["two"]})), [], torch.compile

    def recorder(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda run, fullgraph, backend: compile(run, fullgraph=True, backend=recorder)
    )
    engine.target.varlen_forward.compile()
    for names in ([None] * 4, ["two", None, "two", None], [None] * 4, ["two"] * 4):
        check_rows(engine.generate(IDS, MASK, adapter=names, **GREEDY), adapters, names)
    assert len(compiled) == 2
    engine.load_adapter("one", adapters["one"][1])  # which changes layers that "two" does not
    check_rows(engine.generate(IDS, MASK, adapter=MIXED, **GREEDY), adapters)
    engine.unload_adapter("two")
    engine.load_adapter("two", adapters["two"][1])
    for names in (MIXED, ["one"] * 4, [None] * 4):
        check_rows(engine.generate(IDS, MASK, adapter=names, **GREEDY), adapters, names)
    assert len(compiled) == 3
