"""Blocks and MTP layers draft over entries in a paged cache, as on a GPU, what a plain recomputation gives."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

pytest.importorskip("triton")

from helpers.dflash import DFLASH_FORMS, checked_blocks, random_block_drafter
from helpers.features import pair, written_alone
from helpers.generation import noted, same_as_model, same_undrafted
from helpers.models import DRAFTER_ALONE, paged, prompts_of, tiny_model, with_tree
from helpers.mtp import FORMS, checked_layers, mtp_tensors, random_mtp
from helpers.right_drafts import RightDrafts
from helpers.scheduling import run, scheduler
from redrafter import DFlashDrafter, ReDrafter, kernels
from redrafter.cache import block_manager
from redrafter.cache.paged import PagedCache
from redrafter.drafting import block_drafter, mtp, paged_entries
from redrafter.drafting.dflash import DFlashProposer
from redrafter.drafting.mtp import MTPProposer
from redrafter.kernels.attention_inputs import AttentionInputs
from redrafter.model.target import Target
from redrafter.tree.sizes import TreeShape


@pytest.fixture
def pages(monkeypatch):
    """Let drafts of blocks read entries in a paged cache, as those of MTP layers always do."""
    monkeypatch.setattr("redrafter.drafting.block_drafter.reads_pages", lambda cache: isinstance(cache, PagedCache))


@pytest.fixture
def kernel(pages, monkeypatch):
    """Let drafts attend by the Triton kernel itself, in its interpreter, and count its calls."""
    if torch.cuda.is_available():
        pytest.skip("tests/kernels/test_gpu.py compares both on a GPU")
    calls = []

    def attend(*arguments: object) -> Tensor:
        inputs = AttentionInputs.from_arguments(*arguments)
        calls.append(inputs)
        return kernels.attention.tree_attention(inputs)

    monkeypatch.setattr(paged_entries, "tree_attention", attend)
    # Each program takes long in the interpreter.
    monkeypatch.setattr(import_module("redrafter.kernels.attention"), "TARGET_PROGRAMS", 2)
    return calls


@pytest.mark.parametrize("form", DFLASH_FORMS)
def test_blocks_of_every_form_follow_from_the_whole_text(form, pages):
    engine = paged(with_tree(tiny_model("llama"), random_block_drafter(**DFLASH_FORMS[form]), 4, 3))
    with checked_blocks():
        same_as_model(engine, *prompts_of([21, 3, 9]), max_new_tokens=8)
    same_undrafted(engine, *prompts_of([21, 3, 9]), max_new_tokens=8, do_sample=True, seed=3)


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 4, 99)], ids=["chain", "tree"])
@pytest.mark.parametrize("form", ["deepseek_v3", "mimo", "qwen3_next", "nemotron_h"])
def test_layers_draft_chains_and_trees_as_the_whole_text_says(form, shape, pages):
    if form == "nemotron_h" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this version of transformers counts the model's layers otherwise")
    model = FORMS[form].model()
    model.generation_config.eos_token_id = None
    target = Target(model)
    layer = random_mtp(target, FORMS[form])
    with checked_layers(mtp_tensors(model, FORMS[form]), FORMS[form]):
        engine = paged(ReDrafter(target, layer, TreeShape(*shape), options=DRAFTER_ALONE))
        same_undrafted(engine, *prompts_of([21, 3, 9]), max_new_tokens=12, do_sample=False)


def drafted(engine: ReDrafter, proposer: type) -> list[Tensor]:
    """Return the trees of all steps of a call over rows of unequal length."""
    engine.pauses = False
    with pytest.MonkeyPatch.context() as patch:
        trees = noted(patch, proposer, "propose", lambda tree, _, state, *rest: tree.tokens[state.active])
        engine.generate(*prompts_of([21, 3]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return trees


@pytest.mark.parametrize("past", [7, 1024])
@pytest.mark.parametrize(
    "shape", [(1, 3, 4), pytest.param((3, 3, 5), marks=pytest.mark.variant)], ids=["chain", "tree"]
)
def test_layers_draft_by_the_kernel_what_they_draft_on_a_dense_cache(shape, past, monkeypatch, request):
    monkeypatch.setattr(mtp, "PAST", past)
    target = Target(tiny_model("qwen2"))
    layer = random_mtp(target, FORMS["mimo"])
    engine = ReDrafter(target, layer, TreeShape(*shape), options=DRAFTER_ALONE)
    dense = drafted(engine, MTPProposer)
    kernel = request.getfixturevalue("kernel")
    pages = drafted(paged(engine), MTPProposer)
    assert kernel
    assert len(pages) == len(dense) > 1
    assert all(torch.equal(*trees) for trees in zip(pages, dense, strict=True))
    assert max(len(tree.unique()) for tree in dense) > 3, "the drafts say nothing"


def test_a_search_has_slots_for_all_entries_that_it_makes():
    target = Target(tiny_model("qwen2"))
    layer = random_mtp(target, FORMS["mimo"])
    slots = [layer.proposer(target, *shape, None, False).scratch_slots for shape in ((3, 4, 5), (1, 4, 5), (3, 4, 13))]
    assert slots == [1 + 3 * 3, 5, 13]


@pytest.mark.parametrize("form", ["DFlash", "speculators'", "DFlash2"])
def test_blocks_draft_by_the_kernel_what_they_draft_over_copies(form, kernel):
    drafter = random_block_drafter(**DFLASH_FORMS[form])
    engine = with_tree(tiny_model("llama"), drafter, 3, 3)
    copies = drafted(engine, drafter.proposer_class)
    assert not kernel
    pages = drafted(paged(engine), drafter.proposer_class)
    assert kernel
    assert all(torch.equal(*trees) for trees in zip(pages, copies, strict=True))


@pytest.fixture
def compiled(pages, monkeypatch):
    """Let drafts and entries be compiled, as on a GPU: by Dynamo alone, which must trace each function whole."""
    for drafter in (DFlashDrafter, mtp.MTPDrafter):
        proposer, layer = drafter.proposer, drafter.stored_layer
        monkeypatch.setattr(drafter, "proposer", lambda *given, made=proposer: made(*given[:-1], True))
        monkeypatch.setattr(drafter, "stored_layer", lambda self, target, _, made=layer: made(self, target, True))
    calls = []

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        whole = torch.compile(function, backend="eager", fullgraph=True)
        return lambda *arguments: calls.append(function.__name__) or whole(*arguments)

    monkeypatch.setattr(mtp, "compile_once", traced)
    monkeypatch.setattr(block_drafter, "_compiled_fill", lambda: traced(vars(block_drafter)["_fill_paged"]))
    monkeypatch.setattr(block_drafter, "compile_once", traced)
    return calls


def engine_with(name: str) -> tuple[ReDrafter, type]:
    """Return an engine that drafts trees of some kind, and the class of its proposer."""
    if name in DFLASH_FORMS:
        return with_tree(tiny_model("llama"), random_block_drafter(**DFLASH_FORMS[name]), 3, 3), DFlashProposer
    target = Target(FORMS[name].model())
    target.model.generation_config.eos_token_id = None
    return ReDrafter(target, random_mtp(target, FORMS[name]), TreeShape(3, 3, 10), options=DRAFTER_ALONE), MTPProposer


@pytest.mark.parametrize(
    "name",
    ["mimo", "DFlash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "DFlash2"))],
)
@pytest.mark.variant
def test_a_compiler_traces_drafts_and_entries_whole(name, compiled):
    engine, proposer = engine_with(name)
    dense = drafted(engine, proposer)
    assert name not in DFLASH_FORMS or set(compiled) == {"_remember"}  # over copies of entries, drafts are not compiled
    pages = drafted(paged(engine), proposer)
    assert len(set(compiled)) == 2
    assert all(torch.equal(*trees) for trees in zip(pages, dense, strict=True))


@pytest.mark.variant
def test_a_compiler_traces_drafts_where_the_program_has_chosen_a_default_device(compiled):
    engine, proposer = engine_with("DFlash")
    with torch.device("cpu"):
        assert drafted(paged(engine), proposer)
    assert len(set(compiled)) == 2


def test_a_layer_that_cannot_be_compiled_is_run_as_it_is_and_says_so(compiled, monkeypatch):
    def fails(*_: Any) -> None:
        raise torch._dynamo.exc.Unsupported("no code of that kind")

    monkeypatch.setattr(mtp, "compile_once", lambda function: fails)
    engine, proposer = engine_with("mimo")
    with pytest.warns(UserWarning, match=r"cannot be compiled \(no code of that kind\): its drafts are slower"):
        assert drafted(paged(engine), proposer)


@pytest.mark.parametrize("name", ["DFlash", "MTP"])
def test_sequences_that_share_prefixes_and_are_read_in_chunks_draft_over_pages(name, pages, monkeypatch):
    monkeypatch.setattr(block_manager, "MIN_SAVED", 1)  # texts are short
    made = pair("text", name)
    expected, sequences = written_alone("text"), made.sequences()
    drafts = RightDrafts([[*each.request.prompt, *tokens] for each, tokens in zip(sequences, expected, strict=True)])
    with made.watched(), drafts.drafted():
        run(scheduler(made.engine, max_num_tokens=40), sequences, apart=1)
    assert [sequence.sink.tokens for sequence in sequences] == expected
