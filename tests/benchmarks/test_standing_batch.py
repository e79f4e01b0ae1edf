"""Steps after contexts of any length, and heads of any size, as the script measures them."""

import sys

import pytest

import standing_batch
from helpers.models import CONTEXT, HIDDEN, VOCAB, tiny_drafter, tiny_model, with_tree
from padded_model import SHAPES, load_pair
from padding import PadShape
from redrafter import ArgumentError
from redrafter.cli.measure_options import BenchOptions
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.measure import steps as steps_module
from standing_batch import bench_parser, long_texts, measure_contexts, random_drafter

PROMPTS = [[5, 9, 14, 3, 22, 8], [7, 7, 30], [41, 12, 13, 60, 2, 4, 4, 19]]


@pytest.fixture(autouse=True)
def _rough(monkeypatch):
    monkeypatch.setattr(steps_module, "MIN_TIMED_CALLS", 2)
    monkeypatch.setattr(steps_module, "MAX_CPU_SECONDS", 0.0)


def test_contexts_past_the_models_own_are_timed_and_marked():
    engine = with_tree(tiny_model("llama"), tiny_drafter(), 3, 2)
    rows = [*measure_contexts(engine, PROMPTS, BenchOptions(batch_sizes=(2,)), (20, CONTEXT + 30))]
    assert [row[0] for row in rows] == [f"2 x {name}" for name in ("20", "20", f"{CONTEXT + 30}*", f"{CONTEXT + 30}*")]
    assert [row[3] is None for row in rows] == [True, False, True, False]


def test_long_texts_share_no_block():
    texts = long_texts(PROMPTS, 9, 40)
    assert [len(text) for text in texts] == [40] * 9
    assert len({tuple(text[:BLOCK_SIZE]) for text in texts}) == 9
    assert texts[0][:17] == [token for prompt in PROMPTS for token in prompt]


def test_a_random_drafter_has_the_shape_but_for_its_head():
    drafter = tiny_drafter()
    small, full = random_drafter(drafter, 20), random_drafter(drafter, VOCAB)
    assert small.lm_head.weight.shape == (20, 2 * HIDDEN)
    assert len(small.draft_ids.unique()) == 20
    assert full.lm_head.weight.shape == (VOCAB, 2 * HIDDEN)
    assert full.draft_ids is None
    assert full.draft_bytes(3) == drafter.draft_bytes(3)
    with pytest.raises(ArgumentError, match="draft_vocab_size"):
        random_drafter(drafter, VOCAB + 1)


@pytest.mark.variant  # loads the boxed pair twice
def test_a_padded_pair_is_measured_and_the_script_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "twice", PadShape(192, 320, 41, 6, 2, 32, 2304))
    words = "--device cpu --pad-to twice --context 9 --draft-vocab-sizes 64 --max-new-tokens 4 --num-prompts 1"
    monkeypatch.setattr(sys, "argv", ["standing_batch.py", *words.split()])
    assert standing_batch.main() == 0
    out = capsys.readouterr().out
    assert "boxed's text at twice's cost" in out
    assert out.count("1 x 9") == 2
    assert "1 rows, 64 ids" in out
    args = bench_parser("x").parse_args(["--device", "cpu", "--pad-to", "twice", "--pad-head-rank", "8"])
    with pytest.raises(ArgumentError, match="head_rank"):
        load_pair(args)
