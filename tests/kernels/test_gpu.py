"""Captured steps on a GPU: the same tokens for every architecture, without a wait or an allocation within a step."""

import gc
import os
import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LogitsProcessor, LogitsProcessorList

from helpers.attention import tree_attention_reference
from helpers.dflash import DFLASH_FORMS, random_block_drafter
from helpers.eagle import EAGLE_FORMS, checked_drafts, random_head
from helpers.generation import noted
from helpers.models import ARCHITECTURES, CHUNKED, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.mtp import FORMS, random_mtp
from helpers.recurrent import generated_alone, recurrent_model
from helpers.seeing_models import prompts_with_images, tiny_seeing_model
from helpers.vocabularies import renumbered
from redrafter import DraftTarget, Engine, ReDrafter
from redrafter.checkpoints.quantization import quantize_model
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.engine.options import EngineOptions
from redrafter.kernels.attention_inputs import AttentionInputs
from redrafter.model.target import Target
from redrafter.scheduler.captured_step import CapturedStep, GraphCapturer
from redrafter.train.config import TrainConfig
from redrafter.train.loop import train
from redrafter.tree.sizes import TreeShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NEW = 20
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}
PROCESSED = {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
READS_LAYERS = {"recurrence": "gated", "target_layers": (0, 1), "head_rank": 16}
READS_TEXT = READS_LAYERS | {"context_window": 12, "context_head_dim": 8}
NOT_CAPTURED = {"deepseek_v3", "gpt_oss", "jamba", "qwen3_moe"}  # each with a warning that says why


def on_gpu(architecture: str, drafter: DrafterModel | None = None, **options: object) -> ReDrafter:
    engine = with_tree(tiny_model(architecture).cuda(), (drafter or tiny_drafter()).cuda(), 5, 5)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, **options)
    return engine


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = uneven_batch()
    return ids.cuda(), mask.cuda()


def check(engine: Engine) -> None:
    """Fail unless steps with and without drafts give the same tokens, and greedy ones those of `model.generate`."""
    ids, mask = batch()
    expected = engine.model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for arguments in ({"do_sample": False}, SAMPLING, PROCESSED):
        out = [engine.generate(ids, mask, max_new_tokens=NEW, speculate=s, **arguments) for s in (True, False, True)]
        assert torch.equal(out[0], out[1])
        assert torch.equal(out[0], out[2])
        if not arguments["do_sample"]:
            assert torch.equal(out[0], expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_captured_steps_write_what_model_generate_writes(architecture):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(on_gpu(architecture, compile=False))
    told = [str(each.message) for each in said if "slower" in str(each.message)]
    assert len(told) == (1 if architecture in NOT_CAPTURED else 0), told


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_compiled_steps_write_what_model_generate_writes(architecture):
    check(on_gpu(architecture, compile=True))


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_a_base_with_groups_of_small_integers_writes_what_model_generate_writes(scheme, compile):
    model = tiny_model("llama", hidden_size=64, intermediate_size=96).cuda()
    quantize_model(model, "llama", scheme)
    engine = with_tree(model, tiny_drafter(hidden_size=64).cuda(), 5, 5)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, compile=compile)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*slower", UserWarning)  # a step that cannot be captured says so
        check(engine)


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("form", [READS_LAYERS, READS_TEXT], ids=["layers", "text"])
def test_a_drafter_that_reads_other_layers_or_the_text_changes_no_token(form, architecture, compile):
    engine = on_gpu(architecture, tiny_drafter(**form), compile=compile)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gpt_oss is not captured, and says so
        check(engine)


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("form", [READS_LAYERS, READS_TEXT], ids=["layers", "text"])
def test_a_captured_step_tells_the_drafter_what_a_plain_forward_does(form, compile):
    """The same drafts are accepted as on the CPU, by a drafter that goes by what it reads."""
    model, drafter = tiny_model("llama"), tiny_drafter(**form)
    ids, mask = uneven_batch()
    text = with_tree(model, drafter, 5, 5).generate(ids, mask, max_new_tokens=NEW, do_sample=False, speculate=False)
    how = TrainConfig(steps=60, draft_len=5, lr=0.01, compile=False, cpu=True, log_every=60, mixed_precision="no")
    train(model, drafter, [(text, text >= 0)] * how.steps, how, log=lambda line: None)
    steps = []
    for engine in (with_tree(model, drafter, 5, 5), on_gpu("llama", deepcopy(drafter), compile=compile)):
        at = engine.target.device
        out = engine.generate(
            ids.to(at), mask.to(at), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
        )
        steps.append(out.stats.steps)
    assert steps[0] == steps[1] < 4 * NEW / 2


def step_of_rows(engine: Engine, rows: int) -> CapturedStep:
    """Return the step of so many rows that an engine has kept; there is one."""
    steps = [step for running in engine.batches.idle for step in running.captured_steps.values()]
    [step] = [step for step in steps if len(step.state.length) == rows]
    return step


def neither_waits_nor_allocates(step: CapturedStep) -> None:
    """Fail if a replay waits for the device or allocates memory."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.filterwarnings("ignore:.*slower:UserWarning")
def test_chunks_of_positions_are_kept_in_captured_steps():
    engine = with_tree(tiny_model("llama4_text", **CHUNKED).cuda(), tiny_drafter().cuda(), 5, 5)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, compile=False)
    check(engine)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.19"), reason="images need transformers 5.19")
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_texts_behind_images_are_those_of_model_generate(family):
    model = tiny_seeing_model(family)
    inputs = {name: value.cuda() for name, value in prompts_with_images(model).items()}
    engine = with_tree(model.cuda(), tiny_drafter().cuda(), 5, 3)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1)
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(engine.generate(**inputs, max_new_tokens=NEW, do_sample=False), expected)
    drafted, plain = (engine.generate(**inputs, max_new_tokens=NEW, speculate=s, **SAMPLING) for s in (True, False))
    assert torch.equal(drafted, plain)


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_captured_steps_with_an_eagle_head_write_what_model_generate_writes(form):
    check(on_gpu("llama", random_head(**EAGLE_FORMS[form]), compile=False))


def with_head(form: str, *, compile: bool) -> ReDrafter:
    options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, compile=compile, draft_from_text=False)
    target, head = Target(tiny_model("llama").cuda()), random_head(**EAGLE_FORMS[form]).cuda()
    engine = ReDrafter(target, head, TreeShape(5, 5, 999), options=options)
    engine.pauses = False
    return engine


class Unchanged(LogitsProcessor):
    """A processor of the caller's own, with which steps are not captured."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize("form", ["published", "speculators", "yarn"])
def test_drafts_that_read_blocks_follow_from_the_whole_text(form):
    engine = with_head(form, compile=False)
    with checked_drafts():
        processors = LogitsProcessorList([Unchanged()])
        engine.generate(*batch(), max_new_tokens=24, do_sample=False, logits_processor=processors)


@pytest.mark.parametrize("form", ["published", "speculators"])
def test_a_compiled_head_drafts_what_it_drafts_uncompiled(form):
    stats = []
    for compile in (False, True):
        engine = with_head(form, compile=compile)
        for rows in (1, 4):
            ids, mask = (x[:rows] for x in batch())
            out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
            stats.append((out.stats.steps, out.stats.drafted, out.stats.accepted_by_depth))
        neither_waits_nor_allocates(step_of_rows(engine, 4))
        check(engine)
    assert stats[:2] == stats[2:]


def drafting_over_pages(name: str, shape: tuple[int, int, int], *, compile: bool) -> ReDrafter:
    """Return an engine that drafts with a random drafter of blocks, or a random MTP layer, of some form."""
    model = tiny_model("llama") if name in DFLASH_FORMS else FORMS[name].model()
    model.generation_config.eos_token_id = None
    target = Target(model.cuda())
    drafter = (
        random_block_drafter(**DFLASH_FORMS[name]).cuda() if name in DFLASH_FORMS else random_mtp(target, FORMS[name])
    )
    options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, draft_from_text=False, compile=compile)
    engine = ReDrafter(target, drafter, TreeShape(*shape), options=options)
    engine.pauses = False
    return engine


@pytest.mark.parametrize(
    ("name", "compile"),
    [(name, False) for name in DFLASH_FORMS] + [(name, True) for name in ("DFlash", "speculators'", "DFlash2")],
)
def test_captured_steps_with_blocks_write_what_model_generate_writes(name, compile):
    engine = drafting_over_pages(name, (5, 4, 21), compile=compile)
    engine.generate(*batch(), max_new_tokens=NEW, do_sample=False)
    assert step_of_rows(engine, 4).graph is not None
    check(engine)


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 3, 5)], ids=["chain", "tree"])
def test_captured_steps_with_an_mtp_layer_write_what_model_generate_writes(shape, compile):
    engine = drafting_over_pages("mimo", shape, compile=compile)
    engine.generate(*batch(), max_new_tokens=NEW, do_sample=False)
    assert step_of_rows(engine, 4).graph is not None
    assert engine.drafter.is_compilable
    check(engine)


@pytest.mark.filterwarnings("ignore:.*slower:UserWarning")
@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("name", ["DFlash", "speculators'", "DFlash2", "mimo", "deepseek_v3"])
def test_drafts_over_pages_are_those_over_copies(name, compile, monkeypatch):
    """Steps run uncaptured here, so that the trees of each can be compared."""
    monkeypatch.setattr(GraphCapturer, "capture", lambda *_: None)
    found = []
    for pages in (True, False):
        if not pages:
            monkeypatch.setattr("redrafter.drafting.block_drafter.reads_pages", lambda _: False)
            reference = lambda *given: tree_attention_reference(AttentionInputs.from_arguments(*given))  # noqa: E731
            monkeypatch.setattr("redrafter.drafting.paged_entries.tree_attention", reference)
        engine = drafting_over_pages(name, (3, 3, 10), compile=compile and (pages or name in DFLASH_FORMS))
        with monkeypatch.context() as patch:
            trees = noted(
                patch, type(engine.proposer), "propose", lambda tree, _, state, *rest: tree.tokens[state.active].cpu()
            )
            engine.generate(*batch(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        found.append([tree for tree in trees if len(tree)])
    assert len(found[0]) == len(found[1]) > 3
    same = [(a == b).float().mean() for a, b in zip(*found, strict=True)]
    assert torch.stack(same).mean() > 0.99  # sums of another order may decide a near-tie


@pytest.mark.parametrize(
    "drafter",
    [
        tiny_drafter,
        partial(tiny_drafter, **READS_TEXT),
        partial(random_head, **EAGLE_FORMS["published"]),
    ],
    ids=["published", "text", "eagle"],
)
def test_a_step_neither_waits_nor_allocates(drafter):
    engine = on_gpu("llama", drafter(), compile=False)
    ids, mask = batch()
    engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    neither_waits_nor_allocates(step_of_rows(engine, 4))


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("name", ["DFlash2", "recurrent", "mimo"])
def test_a_step_that_drafts_over_pages_neither_waits_nor_allocates(name, compile):
    engine = drafting_over_pages(name, (3, 3, 5), compile=compile)
    engine.generate(*batch(), max_new_tokens=NEW, do_sample=False)
    neither_waits_nor_allocates(step_of_rows(engine, 4))


def test_nothing_is_collected_while_a_step_is_captured():
    """Collect garbage at every allocation: a graph that is freed during another's capture would end the process."""
    engine, collected = on_gpu("llama", compile=False), []
    engine.generate(*batch(), max_new_tokens=NEW, do_sample=False)
    gc.set_threshold(1)
    gc.callbacks.append(lambda phase, info: collected.append(torch.cuda.is_current_stream_capturing()))
    try:
        engine.generate(*(x[:2] for x in batch()), max_new_tokens=NEW, do_sample=False)
    finally:
        gc.callbacks.pop()
        gc.set_threshold(700, 10, 10)
    assert collected
    assert not any(collected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_steps_of_other_sizes_compile_no_attention_kernel(architecture):
    from redrafter.kernels.attention import _attend_kernel

    compiled = _attend_kernel.device_caches[torch.cuda.current_device()][0]
    compiled.clear()  # which earlier tests have filled
    # Strides that 16 divides in any layout have the same variants, as those of real models do.
    engine = with_tree(tiny_model(architecture, head_dim=16).cuda(), tiny_drafter().cuda(), 5, 5)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, compile=False)
    assert engine.shared_memory
    before = set(compiled)
    assert len(before) > 3
    for rows in (1, 4, 64):
        ids, mask = (x[:1].expand(rows, -1) for x in batch())
        for speculate in (True, False):
            engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False, speculate=speculate)
    assert set(compiled) == before


def test_a_target_knows_whether_it_can_be_packed():
    target = Target(tiny_model("llama").cuda())
    assert target.varlen.ok
    assert Target(tiny_model("llama")).varlen.reason == "it is not on a GPU"


def drafting(architecture: str, draft: str, *, compile: bool = False, **how: object) -> DraftTarget:
    options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, compile=compile)
    target, draft_model = tiny_model(architecture), tiny_model(draft, num_hidden_layers=1)
    return DraftTarget(Target(target.cuda()), Target(draft_model.cuda()), options=options, **how)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_beams": 3, "node_budget": 6}, {"adaptive": True}], ids=str)
@pytest.mark.parametrize("pair", [("llama", "gpt2"), ("gemma2", "llama"), ("qwen3", "mistral"), ("gpt2", "phi3")])
def test_a_draft_model_in_captured_steps_changes_no_token(pair, how):
    check(drafting(*pair, **how))


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_beams": 3, "node_budget": 6}], ids=str)
@pytest.mark.parametrize("architecture", ["lfm2", "mamba2", "olmo_hybrid", "jamba"])
def test_recurrent_states_are_rolled_back_in_captured_steps(architecture, how):
    ids, mask = batch()
    model, draft = deepcopy(recurrent_model(architecture)).cuda(), deepcopy(recurrent_model(architecture)).cuda()
    options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1)
    engine = DraftTarget(Target(model), Target(draft), draft_len=4, options=options, **how)
    out = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, generated_alone(model, ids, mask, NEW))
    assert out.stats.accepted > 0
    plain = engine.generate(ids, mask, max_new_tokens=NEW, speculate=False, **SAMPLING)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=NEW, **SAMPLING), plain)
    steps = [step for running in engine.batches.idle for step in running.captured_steps.values()]
    assert all((step.graph is None) == (architecture in NOT_CAPTURED) for step in steps)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3, "node_budget": 6}], ids=str)
def test_a_draft_model_of_another_vocabulary_changes_no_token(how):
    model = tiny_model("llama")
    draft_model, vocabulary = renumbered(model, 0.67)
    engine = DraftTarget(Target(model.cuda()), Target(draft_model.cuda()), vocabulary=vocabulary, **how)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1)
    check(engine)


def test_a_compiled_draft_model_changes_no_token():
    check(drafting("llama", "gemma2", compile=True))


def test_a_draft_model_that_is_the_target_is_always_right():
    options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, compile=False)
    model = tiny_model("llama").cuda()
    model.generation_config.eos_token_id = None
    for acceptance in ("match", "rejection"):
        engine = DraftTarget(Target(model), Target(model), options=options, acceptance=acceptance)
        for arguments in ({"do_sample": False}, SAMPLING, PROCESSED):
            out = engine.generate(*batch(), max_new_tokens=21, return_dict_in_generate=True, **arguments)
            assert out.stats.tokens_per_step == 5, (acceptance, arguments)


def test_a_step_with_a_draft_model_neither_waits_nor_allocates():
    for acceptance in ("match", "rejection"):
        engine = drafting("llama", "llama", acceptance=acceptance)
        engine.generate(*batch(), max_new_tokens=NEW, **SAMPLING)
        step = step_of_rows(engine, 4)
        assert step.graph is not None
        neither_waits_nor_allocates(step)


def test_rejection_sampling_keeps_the_distribution():
    """The law of two tokens, against what the target's own forwards say."""
    vocab, rows, rounds = 8, 512, 128
    target = tiny_model("llama", vocab_size=vocab).cuda()
    draft_model = tiny_model("qwen2", vocab_size=vocab, num_hidden_layers=1).cuda()
    target.generation_config.eos_token_id = None
    prompt = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        first = target(prompt.cuda()).logits[0, -1].softmax(-1).cpu()
        texts = torch.cat([prompt.expand(vocab, -1), torch.arange(vocab)[:, None]], dim=1)
        second = target(texts.cuda()).logits[:, -1].softmax(-1).cpu()
        texts = torch.cat([texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(vocab)[:, None]], dim=1)
        third = target(texts.cuda()).logits[:, -1].softmax(-1).cpu().view(vocab, vocab, vocab)
    law = (first[:, None, None] * second[:, :, None] * third).double().flatten()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = DraftTarget.from_pretrained(
            target, draft_model, acceptance="rejection", kv_cache_free_gpu_memory_fraction=0.1, compile=False
        )
        counts = torch.zeros(vocab**3)
        for turn in range(rounds):
            ids = prompt.expand(rows, -1)
            out = engine.generate(ids, max_new_tokens=3, do_sample=True, top_k=0, temperature=1.0, seed=turn * rows)
            a, b, c = out[:, 3:].cpu().unbind(1)
            counts += torch.bincount((a * vocab + b) * vocab + c, minlength=vocab**3)
    total = rows * rounds
    generator = torch.Generator().manual_seed(0)
    true = [
        torch.bincount(torch.multinomial(law, total, replacement=True, generator=generator), minlength=vocab**3)
        for _ in range(5)
    ]
    noise = max(float((each / total - law).abs().sum() / 2) for each in true)
    assert float((counts / total - law).abs().sum() / 2) < 1.3 * noise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "llama in int4"])
def test_batch_invariant_steps_change_no_bit(architecture, dtype):
    ids, mask = batch()
    options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, batch_invariant=True)
    name, _, scheme = architecture.partition(" in ")
    model = tiny_model(name).to("cuda", dtype)
    if scheme:
        quantize_model(model, name, scheme)
    target = Target(model)
    engine = ReDrafter(target, tiny_drafter().to("cuda", dtype), TreeShape(5, 5, 999), options=options)
    arguments = {"max_new_tokens": NEW, "min_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    for kind in ({"do_sample": False}, SAMPLING, PROCESSED):
        plain, drafted = (engine.generate(ids, mask, speculate=s, **arguments, **kind) for s in (False, True))
        assert torch.equal(drafted.sequences, plain.sequences)
        assert torch.equal(torch.stack(drafted.logits), torch.stack(plain.logits))
    row = engine.generate(ids[:1, mask[0].argmax() :], **arguments, do_sample=False)
    whole = engine.generate(ids, mask, **arguments, do_sample=False)
    assert torch.equal(torch.stack(row.logits)[:, 0], torch.stack(whole.logits)[:, 0])


@pytest.mark.filterwarnings("ignore:.*your own code runs in Python")
@pytest.mark.parametrize("on_host", [False, True])
def test_rows_with_constants_and_with_code_on_the_host_wait_for_their_turn(on_host):
    ids, mask = (each.cuda() for each in uneven_batch(rows=11))
    options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, max_batch_size=4, compile=False)
    engine = ReDrafter(Target(tiny_model("llama").cuda()), tiny_drafter().cuda(), TreeShape(3, 3, 10), options=options)
    arguments = {"max_new_tokens": NEW, "no_repeat_ngram_size": 3, "suppress_tokens": [13, 60], "logit_bias": {4: 2.0}}
    arguments |= {"eos_token_id": [2, 5, 11, 30, 31, 32, 40], "do_sample": True, "seed": 5, "epsilon_cutoff": 1e-4}
    if on_host:
        arguments["prefix_allowed_tokens_fn"] = lambda row, text: list(range(2 + row, 40 + row))
    expected = engine.generate(ids, mask, speculate=False, **arguments)
    idle = len(engine.batches.idle)
    for _ in range(2):
        assert torch.equal(engine.generate(ids, mask, **arguments), expected)
    assert len(engine.batches.idle) == idle == (not on_host)  # the steps of one call serve the next
    assert all(len(step.state.length) <= 4 for each in engine.batches.idle for step in each.captured_steps.values())


def test_the_first_kernel_that_a_model_launches_is_stored_where_torch_compile_has_triton_store_its_own(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))  # the tests' own cannot be written to
    names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    for name in names:
        monkeypatch.setenv(name, "")  # restored at the end, also if it was not set
        monkeypatch.delenv(name)
    Target(tiny_model("llama").cuda())
    compiler, triton = (os.environ[name] for name in names)
    assert triton == f"{compiler}/triton"
