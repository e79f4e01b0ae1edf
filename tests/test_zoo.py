"""A sample of what `make zoo` checks, and the check itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redrafter.attention.mask import AttentionKind, LayerKinds
from redrafter.model.target import Target
from zoo import check as checking
from zoo.check import CRASHED, DIFFERENT, EQUAL, REFUSED, UNMADE, Outcome, check
from zoo.report import counts, line
from zoo.variants import architectures, variants

BOTH, DENSE = "both caches", "the dense cache"
SAMPLE = [
    ("afmoe", "window 4", BOTH),
    ("bloom", "plain", DENSE),
    ("cohere2", "window 67", BOTH),
    ("deepseek_v2", "plain", BOTH),
    ("deepseek_v32", "window 4", DENSE),
    ("falcon", "alibi, long", DENSE),
    ("falcon", "grouped", DENSE),
    ("gemma4_text", "window 67", BOTH),
    ("glm_moe_dsa", "window 67", DENSE),
    ("gpt_bigcode", "plain", BOTH),
    ("gpt_neo", "window 67", DENSE),
    ("lfm3", "window 4", BOTH),
    ("llama", "stray window 67", BOTH),
    ("llama4_text", "window 67", BOTH),
    ("mamba2", "plain", BOTH),
    ("ministral3", "scaled, long", BOTH),
    ("modernbert-decoder", "window 67", BOTH),
    ("mpt", "plain", DENSE),
    ("opt", "plain", BOTH),
    ("phi3", "longrope", BOTH),
    ("phi3", "longrope, long", BOTH),
    ("phimoe", "window 67", BOTH),
    ("roberta", "plain", BOTH),
    ("whisper", "plain", BOTH),
    ("xglm", "plain", DENSE),
    ("xmod", "plain", BOTH),
]


def checked(model_type: str, name: str) -> Outcome:
    return check(model_type, next(variant for variant in variants(model_type) if variant.name == name))


@pytest.mark.parametrize(("model_type", "name", "served_on"), SAMPLE)
def test_an_architecture_writes_what_transformers_writes(model_type, name, served_on):
    outcome = checked(model_type, name)
    assert outcome.status == EQUAL, outcome.detail
    assert (outcome.unpaged is None) == (served_on == BOTH), outcome.unpaged


@pytest.mark.parametrize(
    ("model_type", "name", "reason"),
    [
        ("recurrent_gemma", "window 4", "does not keep their state in transformers' cache"),
        ("blt", "window 4", "parts of it read other units"),
        ("cpmant", "window 4", "it puts 32 places of its own before each text"),
        ("deepseek_v4", "window 4", "blocks that past tokens are compressed to (compressed_sparse_attention"),
        ("doge", "plain", "changes its masks"),
        ("mvp", "plain", "gives other logits"),  # its prompt_length counts nothing that stands before a text
    ],
)
def test_an_architecture_that_cannot_be_served_is_refused(model_type, name, reason):
    outcome = checked(model_type, name)
    assert outcome.status == REFUSED
    assert reason in outcome.detail


def test_a_window_that_is_not_seen_is_reported(monkeypatch):
    class Blind(Target):
        def __init__(self, model):
            super().__init__(model)
            blind = LayerKinds(None, {"all": AttentionKind()})
            monkeypatch.setattr(self._padded_forward, "_kinds", blind)
            monkeypatch.setattr(self.prompt_reader, "reads_without_masks", lambda cache: False)

    monkeypatch.setattr(checking, "Target", Blind)
    outcome = checked("mistral", "window 67")
    assert outcome.status == DIFFERENT
    assert outcome.failed
    assert "dense, greedy, no drafts: first other token of row 0 is new token" in outcome.detail


def test_an_error_that_is_not_ours_is_reported(monkeypatch):
    def broken(model):
        raise ValueError("no such thing")

    monkeypatch.setattr(checking, "Target", broken)
    outcome = checked("llama", "plain")
    assert outcome.status == CRASHED
    assert outcome.failed
    assert "ValueError: no such thing (test_zoo.py:" in outcome.detail


def test_a_failure_of_one_variant_is_the_architectures():
    outcomes = {"plain": Outcome(EQUAL), "window 4": Outcome(REFUSED, "why"), "window 67": Outcome(DIFFERENT, "where")}
    assert line("some", outcomes).split(maxsplit=2)[1:] == [
        DIFFERENT,
        "[plain] equal; [window 4] refused: why; [window 67] DIFFERENT: where",
    ]
    del outcomes["window 67"]
    served = {"plain": Outcome(EQUAL, unpaged="own code")}
    found = [("some", outcomes), ("other", served), ("third", {"plain": Outcome(UNMADE, "how")})]
    assert counts(found) == "3 architectures: 1 equal, 1 equal on the dense cache only, 1 not made"


def test_every_architecture_of_this_library_has_variants():
    assert len(architectures()) > 100
    for model_type in architectures():
        assert variants(model_type), model_type


@pytest.mark.slow
def test_the_command_writes_a_table_and_ends_with_0(tmp_path):
    command = [sys.executable, "-m", "zoo", "--only", "mamba", "gpt2", "--markdown", str(tmp_path / "table.md")]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 architectures: 2 equal"
    assert "| gpt2 | equal | yes | plain |" in (tmp_path / "table.md").read_text()
