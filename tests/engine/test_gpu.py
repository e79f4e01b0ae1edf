"""FP8 keys and values, LoRA adapters and prefixes with states: no text changes in captured and compiled steps."""

import asyncio
import warnings
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from helpers.adapters import saved
from helpers.models import tiny_drafter, tiny_model, uneven_batch, with_spread_weights
from helpers.recurrent import generated_alone, recurrent_model
from helpers.scheduling import make_sequence, run
from redrafter import ArgumentError, DraftTarget, ReDrafter
from redrafter.engine.options import EngineOptions
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.prefill import ROOMS_OF_BULK
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.waiting_queue import Limits
from redrafter.tree.sizes import TreeShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}}
SHARE = {"kv_cache_free_gpu_memory_fraction": 0.1}
CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
NAMES = ["fp8", "fp8_e5m2"] if CAPABLE else ["fp8_e5m2"]
GREEDY = {"max_new_tokens": 20, "do_sample": False}
MIXED = ["one", None, "two", "one"]
COMPILE = pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])


def on_gpu(architecture: str, dtype: torch.dtype = torch.float32, **options: object) -> ReDrafter:
    target, drafter = Target(tiny_model(architecture).to("cuda", dtype)), tiny_drafter().to("cuda", dtype)
    return ReDrafter(target, drafter, TreeShape(5, 5, 999), options=EngineOptions(**SHARE, **options))


def write(engine, **arguments):
    """Return the texts of an uneven batch, and the logits of each step."""
    ids, mask = (x.cuda() for x in uneven_batch())
    length = {"max_new_tokens": 24, "min_new_tokens": 24}
    out = engine.generate(ids, mask, return_dict_in_generate=True, output_logits=True, **length, **arguments)
    return out.sequences, torch.stack(out.logits)


@pytest.fixture(scope="module", params=[("llama", NAMES[-1]), ("gemma2", NAMES[0]), ("gpt_oss", NAMES[0])], ids=str)
def invariant(request):
    """Return an engine whose forward is compiled once for all settings."""
    architecture, name = request.param
    return on_gpu(architecture, torch.bfloat16, kv_cache_dtype=name, batch_invariant=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_bit_changes_where_batches_are_invariant(invariant, setting):
    plain, drafted = (write(invariant, speculate=speculate, **SETTINGS[setting]) for speculate in (False, True))
    assert torch.equal(drafted[0], plain[0])
    assert torch.equal(drafted[1], plain[1])


@pytest.mark.parametrize("setting", [*SETTINGS.values(), {"do_sample": True, "eta_cutoff": 0.01, "seed": 3}], ids=str)
def test_ids_from_the_host_or_the_gpu_give_the_same_ids_on_the_gpu(setting):
    """A release of transformers may prepare calls on the host; then its processors are made there too."""
    engine, (ids, mask) = on_gpu("llama", compile=False), uneven_batch()
    how = {
        "max_new_tokens": 8,
        "min_new_tokens": 3,
        "suppress_tokens": [5, 7],
        "bad_words_ids": [[9], [11, 12]],
    } | setting
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = [engine.generate(x, y, **how) for x, y in ((ids, mask), (ids.cuda(), mask.cuda()))]
    assert ours[0].is_cuda
    assert torch.equal(ours[0], ours[1])
    if not setting["do_sample"]:
        assert torch.equal(ours[0], engine.model.generate(ids.cuda(), attention_mask=mask.cuda(), **how))


@COMPILE
@pytest.mark.parametrize("name", NAMES)
def test_first_steps_are_plain_decodings(name, compile):
    """In float32 a number at the edge of two of FP8 is rare; logits of first tokens show whether all are rounded."""
    engine = on_gpu("llama", torch.float32, kv_cache_dtype=name, compile=compile)
    plain, drafted = (write(engine, speculate=speculate, do_sample=False)[1][:4] for speculate in (False, True))
    assert (drafted - plain).norm() < 3e-3 * plain.norm()


def test_a_draft_model_has_such_a_cache_too():
    model, small = tiny_model("llama").cuda(), tiny_model("qwen2", num_hidden_layers=1).cuda()
    engine = DraftTarget.from_pretrained(model, small, kv_cache_dtype=NAMES[0], compile=False, **SHARE)
    plain, drafted = (write(engine, speculate=speculate, do_sample=False)[1][:4] for speculate in (False, True))
    assert (drafted - plain).norm() < 3e-3 * plain.norm()
    assert engine.memory.draft_store.fp8 is engine.memory.store.fp8


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def adapters(request, tmp_path_factory):
    """The architecture, PEFT's models with three adapters by name, and their directories."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds = {"one": {}, "two": {"r": 8, "target_modules": ["o_proj", "down_proj"]}, "three": {"use_rslora": True}}
    made = {name: saved(folder / name, request.param, seed, **more) for seed, (name, more) in enumerate(kinds.items())}
    return request.param, made


def check(engine, architecture, made, names):
    ids, mask = (x.cuda() for x in uneven_batch())
    found = engine.generate(ids, mask, adapter=names, **GREEDY)
    assert torch.equal(engine.generate(ids, mask, adapter=names, speculate=False, **GREEDY), found)
    sampled = {"max_new_tokens": 20, "do_sample": True, "seed": 3, "adapter": names}
    assert torch.equal(engine.generate(ids, mask, **sampled), engine.generate(ids, mask, speculate=False, **sampled))
    for row, name in enumerate(names):
        model = (tiny_model(architecture) if name is None else made[name][0]).cuda()
        expected = model.generate(input_ids=ids[row : row + 1], attention_mask=mask[row : row + 1], **GREEDY)[0]
        assert torch.equal(found[row, : len(expected)], expected), name


@COMPILE
def test_rows_with_several_adapters_write_what_each_model_writes(adapters, compile):
    architecture, made = adapters
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*slower", UserWarning)  # steps that are not captured say so
        engine = on_gpu(architecture, compile=compile)
        engine.load_adapter("one", made["one"][1])
        check(engine, architecture, made, ["one", None, "one", "one"])
        engine.load_adapter("two", made["two"][1])  # which changes other layers
        check(engine, architecture, made, MIXED)
        check(engine, architecture, made, [None] * 4)


@COMPILE
def test_a_captured_step_survives_a_change_of_adapters(adapters, compile):
    architecture, made = adapters
    engine = on_gpu(architecture, compile=compile, max_loras=2)
    engine.load_adapter("one", made["one"][1])
    engine.load_adapter("two", made["two"][1])
    check(engine, architecture, made, MIXED)
    steps = captured(engine)
    engine.unload_adapter("one")
    engine.load_adapter("three", made["three"][1])
    check(engine, architecture, made, ["three", None, "two", "three"])
    check_kept(engine, steps)


def captured(engine):
    return [dict(batch.captured_steps) for batch in engine.batches.idle]


def check_kept(engine, steps):
    """Check that steps are still there; others may have come, as what is copied from a text decides their kind."""
    for before, now in zip(steps, captured(engine), strict=True):
        assert before
        assert all(now[key] is step for key, step in before.items())


def check_writes_as(engine, model):
    ids, mask = (x.cuda() for x in uneven_batch())
    drafted = engine.generate(ids, mask, **GREEDY)
    assert torch.equal(drafted, model.generate(ids, attention_mask=mask, **GREEDY))
    for how in (GREEDY, {"max_new_tokens": 20, "do_sample": True, "seed": 3}):
        assert torch.equal(engine.generate(ids, mask, **how), engine.generate(ids, mask, speculate=False, **how))


@COMPILE
def test_captured_steps_write_with_new_weights_and_are_kept(compile):
    engine = on_gpu("llama", compile=compile)
    check_writes_as(engine, tiny_model("llama").cuda())
    steps = captured(engine)
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = with_spread_weights(tiny_model("llama")).cuda()
        engine.update_weights(model.state_dict())
        check_writes_as(engine, model)
        engine.change_drafter(tiny_drafter().to("cuda"))
        check_writes_as(engine, model)
    check_kept(engine, steps)


@COMPILE
@pytest.mark.parametrize("change", ["update_weights", "load_state_dict", "assigned", "sleep"])
def test_coroutines_follow_changes_in_their_memory_and_captured_steps(change, compile):
    engine = on_gpu("llama", compile=compile)
    ids = (torch.arange(40, device="cuda")[None] * 7) % 83 + 4  # longer than a block, so its prefix is stored

    def write(**how: object) -> torch.Tensor:
        return asyncio.run(engine.agenerate(ids, **GREEDY, **how))

    write(), write(speculate=False), engine.generate(ids, **GREEDY)
    torch.manual_seed(1)
    model = with_spread_weights(tiny_model("llama")).cuda()
    if change == "update_weights":
        engine.update_weights(model.state_dict())
    elif change == "sleep":
        model = tiny_model("llama").cuda()
        engine.sleep()
        assert not any(x.untyped_storage().nbytes() for m in engine.target.shared.memories for x in m.tensors)
        taken = torch.empty(1 << 26, device="cuda")  # so that the memory may come back at other addresses
        engine.wake()
        del taken
    else:
        engine.model.load_state_dict(model.state_dict(), assign=change == "assigned")
    expected = model.generate(ids, **GREEDY)
    for speculate in (True, False):
        assert torch.equal(write(speculate=speculate), expected)
        assert torch.equal(engine.generate(ids, speculate=speculate, **GREEDY), expected)


@COMPILE
def test_an_engine_that_slept_writes_on_in_captured_steps_and_holds_no_more_memory(compile):
    engine, model = on_gpu("llama", compile=compile), tiny_model("llama").cuda()
    check_writes_as(engine, model)
    for _ in range(3):
        before, pools = torch.cuda.memory_allocated(), sum(x.nbytes for x in engine.memory.store.pools)
        engine.sleep()
        assert torch.cuda.memory_allocated() < before - pools // 2
        with pytest.raises(ArgumentError, match="asleep"):
            engine.generate(uneven_batch()[0].cuda(), max_new_tokens=2)
        engine.wake()
        assert torch.cuda.memory_allocated() < before + (1 << 20)
        check_writes_as(engine, model)


@COMPILE
@pytest.mark.parametrize("architecture", ["lfm2", "mamba2", "olmo_hybrid"])
def test_states_of_a_stored_prefix_are_restored_where_captured_steps_read_them(architecture, compile):
    model, draft = (deepcopy(recurrent_model(architecture)).cuda() for _ in range(2))
    model.generation_config.eos_token_id = None
    options = EngineOptions(**SHARE, compile=compile)
    engine = DraftTarget(Target(model), Target(draft), draft_len=4, num_beams=3, node_budget=6, options=options)
    served = Scheduler(engine, engine.make_memory(4), Limits(max_batch_size=4))
    states = served.memory.store.states.tensors.values()
    addresses, system = [x.data_ptr() for x in states], [3 + 7 * n % 90 for n in range(82)]
    greedy, sampled = SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=11)

    def asked(number: int, params: SamplingParams = greedy):
        return make_sequence([*system, 5 + number, 11, *range(20 + number, 34)], 24, params)

    sequences = [asked(0), asked(1, sampled), *map(asked, range(2, 6)), asked(1, sampled)]
    for together in (sequences[:1], sequences[1:2], sequences[2:]):
        run(served, together)
    assert [sequence.reused for sequence in sequences] == [0, 0, 80, 80, 80, 80, 96]
    for sequence in (sequences[0], *sequences[2:-1]):
        prompt = torch.tensor([sequence.request.prompt], device="cuda")
        [whole] = generated_alone(model, prompt, torch.ones_like(prompt), 24)
        assert sequence.tokens == whole.tolist()
    assert sequences[1].tokens == sequences[-1].tokens
    assert [x.data_ptr() for x in states] == addresses
    assert any(step.graph is not None for step in served.batch.captured_steps.values())


@COMPILE
@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_rows_that_are_exchanged_in_groups_write_the_same_in_captured_steps(compile, setting, speculate):
    engine = on_gpu("llama", compile=compile, max_batch_size=8)  # in so few rows, sequences end and begin one by one
    torch.manual_seed(4)
    ids = torch.randint(50, 90, (300, 50), device="cuda")
    how = {"max_new_tokens": 40, "eos_token_id": [5, 11, 30, 31, 32]} | SETTINGS[setting]
    expected = engine.generate(ids, speculate=False, **how)
    engine.options = replace(engine.options, max_batch_size=96)
    assert torch.equal(engine.generate(ids, speculate=speculate, **how), expected)
    steps = engine.batches.idle[-1].captured_steps
    assert any(key.rows >= 64 and key.chunks in ROOMS_OF_BULK for key in steps)
    assert all(step.graph is not None for step in steps.values())


@pytest.mark.parametrize("setting", SETTINGS)
def test_times_of_captured_steps_correct_the_costs_that_a_policy_compares(setting):
    engine = on_gpu("llama", compile=False)
    engine.adapts, (ids, mask) = True, (x.cuda() for x in uneven_batch())
    how = {"max_new_tokens": 60, "eos_token_id": None} | SETTINGS[setting]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReDrafter, "pauses", True)
        drafted, plain = (engine.generate(ids, mask, speculate=speculate, **how) for speculate in (True, False))
    assert torch.equal(drafted, plain)
    times, sampled = engine.step_times, setting == "sampled"
    assert not times.lacks(4, engine.undrafted, sampled=sampled), "undrafted steps of this batch size were timed"
    assert times.lacks(4, engine.undrafted, sampled=not sampled)


@COMPILE
@pytest.mark.parametrize("setting", [*SETTINGS.values(), SETTINGS["sampled"] | {"top_k": 20}], ids=str)
def test_rows_that_share_nodes_draw_in_captured_steps_as_without_drafts(compile, setting):
    target = Target(tiny_model("llama").to("cuda"))
    options = EngineOptions(**SHARE, compile=compile)
    engine = ReDrafter(target, tiny_drafter().to("cuda"), TreeShape(4, 4, 17, 16), options=options)
    ids, mask = (x.cuda() for x in uneven_batch())
    how = {"max_new_tokens": 40, "eos_token_id": None} | setting
    drafted, plain = (engine.generate(ids, mask, speculate=speculate, **how) for speculate in (True, False))
    assert torch.equal(drafted, plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_writes_the_same_on_a_gpu_that_is_not_current():
    def texts(device: str) -> list[torch.Tensor]:
        target, drafter = Target(tiny_model("llama").to(device)), tiny_drafter().to(device)
        engine = ReDrafter(target, drafter, TreeShape(5, 5, 999), options=EngineOptions(**SHARE))
        ids, mask = (x.to(device) for x in uneven_batch())
        calls = engine.generate(ids, mask, **GREEDY), asyncio.run(engine.agenerate(ids, mask, **GREEDY))
        return [text.cpu() for text in calls]

    first, second = texts("cuda:0"), texts("cuda:1")
    assert torch.cuda.current_device() == 0
    assert all(map(torch.equal, first, second))
