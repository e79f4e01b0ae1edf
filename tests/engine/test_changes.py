"""An engine that is changed between calls (weights, drafter, sleep) writes what undrafted decoding writes."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.models import tiny_drafter, tiny_model
from redrafter import ArgumentError, CheckpointError, DraftTarget, Engine, MismatchError, ReDrafter, UnsupportedError
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.checkpoints.quantization import quantize_model
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.engine.changes import ChangeDrafter, UpdateWeights
from redrafter.errors import CacheFullError, NotFiniteError
from redrafter.model.quantized_layers import quantize_weight
from redrafter.model.target import Target
from redrafter.model.weights import NewWeights, ParkedMemory, snapshot
from redrafter.parallel.ranks import ALONE
from redrafter.scheduler.paged_memory import prepare

PROMPTS = torch.tensor([[5, 9, 14, 3], [8, 8, 60, 21], [33, 4, 5, 90]])


def other(model_type: str = "llama", seed: int = 5, **changes: object):
    """A model of the same shape with other weights."""
    model = tiny_model(model_type, **changes)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def drafting(model=None, **changes: object) -> ReDrafter:
    return ReDrafter(Target(model or tiny_model("llama")), tiny_drafter(**changes))


def written(engine: Engine, new: int = 12, **arguments: object) -> torch.Tensor:
    return engine.generate(PROMPTS, max_new_tokens=new, **arguments)


def check_writes_as(engine: Engine, model: torch.nn.Module) -> None:
    """Check that an engine writes, with drafts and without, what a model alone writes."""
    plain = Engine(Target(model), UndraftedProposer())
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 4}):
        expected = written(plain, **how)
        assert torch.equal(written(engine, **how), expected)
        assert torch.equal(written(engine, speculate=False, **how), expected)


def rewarded(model: torch.nn.Module, texts: torch.Tensor) -> torch.Tensor:
    """The loss of REINFORCE, where even tokens are wanted."""
    new = texts[:, PROMPTS.shape[1] :]
    logits = model(texts).logits[:, PROMPTS.shape[1] - 1 : -1]
    advantage = (new % 2 == 0).float() - 0.5
    return -(torch.log_softmax(logits.float(), -1).gather(2, new[..., None])[..., 0] * advantage).mean()


def test_rollouts_between_steps_of_policy_gradient_are_those_of_plain_decoding():
    trained, engine = tiny_model("llama", eos_token_id=None), drafting(tiny_model("llama", eos_token_id=None))
    optimizer, seen = torch.optim.Adam(trained.parameters(), lr=0.02), []
    addresses = [weight.data_ptr() for weight in engine.model.parameters()]
    for step in range(4):
        texts = written(engine, 20, do_sample=True, seed=step).clone()  # a tensor of inference mode has no gradients
        assert torch.equal(texts, written(engine, 20, do_sample=True, seed=step, speculate=False))
        plain = Engine(Target(trained.eval()), UndraftedProposer())
        assert torch.equal(texts, written(plain, 20, do_sample=True, seed=step))
        seen.append((texts[:, 4:] % 2 == 0).float().mean().item())
        optimizer.zero_grad()
        rewarded(trained, texts).backward()
        optimizer.step()
        engine.update_weights(trained.state_dict())
    assert seen[-1] > seen[0], "the policy learns"
    assert [weight.data_ptr() for weight in engine.model.parameters()] == addresses
    check_writes_as(engine, trained)


OF_OTHER_NAMES = ("qwen3_moe", "new")  # its checkpoints have names of their own


@pytest.mark.parametrize(
    ("model_type", "source"), [("llama", "new"), OF_OTHER_NAMES, ("llama", "new/model.safetensors")]
)
def test_weights_are_read_from_a_directory_or_a_file(tmp_path, model_type, source):
    new, engine = other(model_type), drafting(tiny_model(model_type))
    new.save_pretrained(tmp_path / "new")
    half = drafting(tiny_model(model_type).bfloat16())
    for each in (engine, half):
        each.update_weights(tmp_path / source)
    check_writes_as(engine, new)
    assert torch.equal(half.model.lm_head.weight, new.lm_head.weight.bfloat16())


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(tmp_path):
    engine, new = drafting(), other().state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    before = snapshot(engine.model)
    wrong = [
        (new | {name: new[name][:-1]}, rf"{name} of shape \(47, 32\) instead of \(48, 32\)"),
        (new | {name: new[name].long()}, f"{name} of int64, which does not become float32"),
        (new | {"lm_head.wieght": new[name]}, "unknown lm_head.wieght"),
        ({key: x for key, x in new.items() if key != name}, f"missing {name}"),
    ]
    for weights, told in wrong:
        with pytest.raises(MismatchError, match=f"none was written.*{told}"):
            engine.update_weights(weights)
    with pytest.raises(ArgumentError, match="tensors by name"):
        engine.update_weights(new | {name: [1.0]})
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    for source, message in ((tmp_path, "cannot be read"), (tmp_path / "none", "holds no weights")):
        with pytest.raises(CheckpointError, match=message):
            engine.update_weights(source)
    after = engine.model.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])  # of the second, checkpoints have names of their own
def test_a_directory_with_a_tensor_that_the_model_has_not_is_refused(tmp_path, model_type):
    other(model_type).save_pretrained(tmp_path)
    engine = ReDrafter(Target(tiny_model(model_type)), tiny_drafter())
    before, file = snapshot(engine.model), tmp_path / "model.safetensors"
    stored = load_file(file)
    cases = {
        "unknown model.layers.0.mlp.extra.weight": stored | {"model.layers.0.mlp.extra.weight": torch.ones(3)},
        r"lm_head.weight of shape \(96, 32\) instead of \(97, 32\)": stored
        | {"lm_head.weight": stored["lm_head.weight"][1:].clone()},
        "missing model.norm.weight": {name: x for name, x in stored.items() if name != "model.norm.weight"},
    }
    for message, tensors in cases.items():
        save_file(tensors, file)
        with pytest.raises(MismatchError, match=message):
            engine.update_weights(tmp_path)
    assert all(torch.equal(x, before[key]) for key, x in engine.model.state_dict().items())


def test_weights_and_drafters_that_were_read_need_no_file_any_more(tmp_path):
    """Truncating a file that is still mapped ends the process, so its map is looked for instead."""
    engine, new = drafting(), other()
    new.save_pretrained(tmp_path / "base")
    better = tiny_drafter(base_embedding_norms=embedding_norms(engine.target.embedding.weight))
    better.save_pretrained(tmp_path / "drafter")
    changes = UpdateWeights(engine, tmp_path / "base"), ChangeDrafter(engine, tmp_path / "drafter")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    for file in tmp_path.rglob("*.safetensors"):
        os.truncate(file, 10)
    for change in changes:
        change.apply()
    check_writes_as(engine, new)


def test_the_files_of_a_model_may_be_written_again_while_it_is_used(tmp_path):
    """A directory that is updated in place is the one that was loaded, as where a trainer always saves to the same."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    tiny_drafter().save_pretrained(tmp_path / "drafter")
    engine = ReDrafter.from_pretrained(tmp_path / "base", tmp_path / "drafter", device="cpu")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    for file in tmp_path.rglob("*.safetensors"):
        os.truncate(file, 10)
    check_writes_as(engine, model)
    other().save_pretrained(tmp_path / "base")
    engine.update_weights(tmp_path / "base")
    check_writes_as(engine, other())


def test_weights_that_are_not_finite_are_refused_or_written_and_named():
    engine, new = drafting(), {name: x.clone() for name, x in other().state_dict().items()}
    assert engine.update_weights(new) == []
    before = snapshot(engine.target.model)
    with pytest.raises(NotFiniteError, match=r"1 tensors .* such as model.norm.weight: none was written"):
        engine.update_weights(new | {"model.norm.weight": torch.full((32,), torch.nan)})
    assert all(torch.equal(value, before[name]) for name, value in snapshot(engine.target.model).items())
    new["model.norm.weight"][3] = torch.nan
    new["lm_head.weight"][2, 1] = -torch.inf
    assert engine.update_weights(new, allow_not_finite=True) == ["model.norm.weight", "lm_head.weight"]
    half = drafting(tiny_model("llama").half())
    new = {name: x.clone() for name, x in other().state_dict().items()}
    new["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    assert half.update_weights(new, allow_not_finite=True) == ["model.layers.0.mlp.up_proj.weight"], (
        "float16 ends at 65,504"
    )
    quantised = tiny_model("llama")
    quantize_model(quantised, "tiny", "fp8")
    assert drafting(quantised).update_weights(new) == [], "FP8 is scaled"
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    wrong = snapshot(quantised) | {scale: torch.full((48,), torch.nan)}
    assert drafting(quantised).update_weights(wrong, allow_not_finite=True) == [scale]
    worse = tiny_drafter()
    worse.lm_head.weight.data[0, 0] = torch.nan
    assert engine.change_drafter(worse) == ["lm_head.weight"]


def test_scales_of_fp8_weights_that_do_not_fit_are_refused():
    quantised = tiny_model("llama")
    quantize_model(quantised, "tiny", "fp8")
    engine, weight = drafting(quantised), "model.layers.0.mlp.up_proj.weight"
    before, scale = snapshot(quantised), f"{weight}_scale"
    wrong = {
        rf"{scale} of shape \(1,\) float32 instead of \(48,\) float32": {scale: torch.ones(1)},
        rf"{scale} of shape \(48,\) float16 instead of \(48,\) float32": {scale: torch.ones(48).half()},
        f"scales of weights that are not quantised: {scale}": {weight: torch.ones(48, 32)},
    }
    for message, tensors in wrong.items():
        with pytest.raises(MismatchError, match=message):
            engine.update_weights(before | tensors)
    after = snapshot(quantised)
    assert all(torch.equal(x.view(torch.uint8), before[key].view(torch.uint8)) for key, x in after.items())


def test_tied_weights_may_be_given_once_and_not_with_two_values():
    engine, new = drafting(tiny_model("llama", tie_word_embeddings=True)), other(tie_word_embeddings=True)
    weights = dict(new.state_dict())
    with pytest.raises(MismatchError, match=r"lm_head.weight, which is tied to model.embed_tokens.weight"):
        engine.update_weights(weights | {"lm_head.weight": weights["lm_head.weight"] + 1})
    nan = torch.full_like(weights["lm_head.weight"], torch.nan)
    tied = {"lm_head.weight": nan, "model.embed_tokens.weight": nan.clone()}
    with pytest.raises(NotFiniteError, match="2 tensors"):
        drafting(tiny_model("llama", tie_word_embeddings=True)).update_weights(weights | tied)
    del weights["lm_head.weight"]
    engine.update_weights(weights)
    check_writes_as(engine, new)


def test_layers_of_fp8_are_quantised_anew():
    quantised, new = tiny_model("llama"), other()
    quantize_model(quantised, "tiny", "fp8")
    engine = drafting(quantised)
    engine.update_weights(new.state_dict())
    layer, weight = engine.model.model.layers[0].mlp.up_proj, new.model.layers[0].mlp.up_proj.weight
    rounded, scale = quantize_weight(weight)
    assert torch.equal(layer.weight.view(torch.uint8), rounded.view(torch.uint8))
    assert torch.equal(layer.weight_scale, scale)
    quantize_model(new, "tiny", "fp8")
    check_writes_as(engine, new)
    NewWeights.for_module(engine.model, snapshot(engine.model), "itself").write()  # as a drafter that goes back
    check_writes_as(engine, new)


def test_fused_layers_and_tables_of_a_drafter_follow_new_weights():
    engine, new = drafting(recurrence="gated"), other()
    memory = engine.make_memory(4)
    prepare(engine.target, memory.store, compile=False)
    assert engine.target.varlen_forward.linears_fused
    engine.drafter.tabulate(engine.target.embedding)
    table, fused = engine.drafter.embedded, engine.target.varlen_forward._fused  # noqa: SLF001
    engine.update_weights(new.state_dict())
    assert engine.drafter.embedded is table, "captured steps know its address"
    assert engine.target.varlen_forward._fused is fused  # noqa: SLF001
    fresh = tiny_drafter(recurrence="gated")
    fresh.tabulate(new.get_input_embeddings())
    torch.testing.assert_close(table, fresh.embedded)
    check_writes_as(engine, new)


def test_a_table_follows_weights_that_were_changed_by_their_owner():
    engine, new = drafting(), other()
    engine.drafter.tabulate(engine.target.embedding)
    with torch.no_grad():
        for weight, numbers in zip(engine.model.parameters(), new.parameters(), strict=True):
            weight.copy_(numbers)
    check_writes_as(engine, new)
    fresh = tiny_drafter()
    fresh.tabulate(new.get_input_embeddings())
    torch.testing.assert_close(engine.drafter.embedded, fresh.embedded)


def test_another_drafter_drafts_and_the_one_before_comes_back(tmp_path):
    engine, model = drafting(), tiny_model("llama")
    before, better = (
        snapshot(engine.drafter),
        tiny_drafter(base_embedding_norms=embedding_norms(model.model.embed_tokens.weight)),
    )
    with torch.no_grad():
        for weight in better.parameters():
            weight.mul_(1.5)
    better.save_pretrained(tmp_path)
    drafts = engine.generate(PROMPTS, max_new_tokens=20, do_sample=False, return_dict_in_generate=True).stats
    with pytest.raises(ArgumentError, match="no previous drafter"):
        engine.change_drafter()
    engine.change_drafter(tmp_path)
    assert torch.equal(engine.drafter.lm_head.weight, better.lm_head.weight)
    check_writes_as(engine, model)
    engine.change_drafter()
    assert all(torch.equal(x, before[key]) for key, x in engine.drafter.state_dict().items())
    again = engine.generate(PROMPTS, max_new_tokens=20, do_sample=False, return_dict_in_generate=True).stats
    assert again.accepted_by_depth == drafts.accepted_by_depth
    check_writes_as(engine, model)


def test_a_drafter_that_does_not_fit_is_refused_by_name(tmp_path):
    engine, before = drafting(), snapshot(drafting().drafter)
    wrong = [
        ({"hidden_size": 16}, "hidden size of 16"),
        ({"num_draft_layers": 1}, "num_draft_layers is 1 instead of"),
        ({"recurrence": "gated"}, "recurrence is 'gated' instead of 'apple'"),
        ({"base_embedding_norms": [9.0] * 8}, "made for another base"),
    ]
    for changes, message in wrong:
        with pytest.raises(MismatchError, match=message):
            engine.change_drafter(tiny_drafter(**changes))
    with pytest.raises(CheckpointError):
        engine.change_drafter(tmp_path)
    assert all(torch.equal(x, before[key]) for key, x in engine.drafter.state_dict().items())
    plain = DraftTarget(Target(tiny_model("llama")), Target(tiny_model("qwen2", num_hidden_layers=1)), draft_len=2)
    with pytest.raises(UnsupportedError, match="no trained drafter"):
        plain.change_drafter(tiny_drafter())


def test_an_engine_that_sleeps_writes_nothing_and_wakes_with_the_same_texts():
    engine = drafting()
    expected = written(engine, do_sample=False)
    engine.wake()
    engine.sleep()
    engine.sleep()
    assert engine.asleep
    with pytest.raises(ArgumentError, match="asleep and decodes nothing"):
        written(engine)
    with pytest.raises(ArgumentError, match="wake it first"):
        engine.update_weights(engine.model.state_dict())
    engine.wake()
    assert torch.equal(written(engine, do_sample=False), expected)


def test_ranks_of_which_one_has_too_little_memory_sleep_on():
    engine = drafting()
    expected = written(engine, do_sample=False)
    engine.sleep()
    short = CacheFullError("rank 1 has too little memory")
    engine.target.ranks = SimpleNamespace(size=1, gather=lambda value: [value, short])
    with pytest.raises(CacheFullError, match="rank 1"):
        engine.wake()
    assert engine.asleep
    engine.target.ranks = ALONE
    engine.wake()
    assert torch.equal(written(engine, do_sample=False), expected)


def test_parked_memory_is_given_back_and_comes_again_in_every_view():
    whole, apart = torch.arange(24.0).view(6, 4), torch.ones(5)
    part, parked = whole[2:4], ParkedMemory()
    parked.park([whole, part, apart[1:]], keep=True)
    assert parked.num_bytes == 24 * 4 + 5 * 4
    assert whole.untyped_storage().nbytes() == apart.untyped_storage().nbytes() == 0
    parked.restore()
    assert torch.equal(whole, torch.arange(24.0).view(6, 4))
    assert torch.equal(part, whole[2:4])
    part.fill_(-1)
    assert whole[2:4].eq(-1).all(), "a view is still one"
    parked.park([apart], keep=False)
    parked.restore()
    assert apart.eq(0).all()


def test_nothing_is_changed_while_a_call_runs():
    engine, told = drafting(), []

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            if tokens.dim() > 1:  # the prompt, before the call is decoded
                return
            thread = threading.Thread(target=change)
            thread.start()
            thread.join()

        def end(self) -> None:
            pass

    def change() -> None:
        try:
            engine.update_weights(other().state_dict())
        except ArgumentError as error:
            told.append("is running" in str(error))
        else:
            told.append(False)

    engine.generate(PROMPTS[:1], max_new_tokens=6, do_sample=False, streamer=Streamer())
    assert told
    assert all(told)
    engine.update_weights(other().state_dict())
    check_writes_as(engine, other())
