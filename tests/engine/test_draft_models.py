"""Draft models that are refused, those that know the same texts in other tokens, and how far they draft."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from helpers.generation import same_undrafted
from helpers.models import VOCAB, tiny_model, uneven_batch
from redrafter import ArgumentError, CheckpointError, DraftTarget, MismatchError, UnsupportedError
from redrafter.drafting.draft_model import DraftModelProposer
from redrafter.drafting.policy import CostPolicy, DraftedStep, StepRows
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.drafting.step_times import StepCosts, StepTimes
from redrafter.model.target import Target

IDS, MASK = uneven_batch()


def save(path, tokens, **changes):
    """Write a tiny model beside a tokenizer of these tokens."""
    vocabulary = {token: id for id, token in enumerate(tokens)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)
    tiny_model("llama", **changes).save_pretrained(path)
    return str(path)


def test_a_draft_model_on_another_device_is_refused(llama):
    target, draft_model = Target(llama), Target(tiny_model("qwen2", num_hidden_layers=1))
    draft_model.device = torch.device("meta")
    with pytest.raises(ArgumentError, match="the draft model is on meta and the target on cpu: move one"):
        DraftTarget(target, draft_model)


def test_models_that_write_with_other_tokens_are_refused(tmp_path):
    words = [f"word{id}" for id in range(VOCAB)]
    model = save(tmp_path / "model", words)
    padded = save(tmp_path / "padded", words, vocab_size=128, num_hidden_layers=1)
    other = save(tmp_path / "other", [*words[:5], "else", *words[6:]], num_hidden_layers=1)
    more = save(tmp_path / "more", [*words, "more"], vocab_size=128, num_hidden_layers=1)
    engine = DraftTarget.from_pretrained(model, padded)  # a larger table alone is padding
    same_undrafted(engine, IDS, MASK, max_new_tokens=8, do_sample=False)
    with pytest.raises(MismatchError, match=r"97 tokens against 97, id 5 is 'word5' in one and 'else' in the other"):
        DraftTarget.from_pretrained(model, other)
    with pytest.raises(MismatchError, match="97 tokens against 98, id 97 is None in one and 'more' in the other"):
        DraftTarget.from_pretrained(model, more)
    with pytest.raises(MismatchError, match="word5"):  # loaded models have a name too
        DraftTarget.from_pretrained(engine.model, type(engine.model).from_pretrained(other))
    with pytest.raises(MismatchError, match="word5"):
        DraftTarget.from_pretrained(engine.target, other)
    with pytest.raises(CheckpointError, match="tokenizer"):
        (tmp_path / "other" / "tokenizer.json").unlink()
        (tmp_path / "other" / "tokenizer_config.json").unlink()
        DraftTarget.from_pretrained(model, other)
    DraftTarget.from_pretrained(model, tiny_model("gpt2"))  # without one there is nothing to compare


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        *(({"draft_len": bad}, ArgumentError, "draft_len") for bad in (0, -1, True, "4", 2.0, None)),
        *(({"num_beams": bad}, ArgumentError, "num_beams") for bad in (0, False, "3")),
        *(({"node_budget": bad}, ArgumentError, "node_budget") for bad in (0, True, 1.5)),
        *(({"adaptive": bad}, ArgumentError, "adaptive") for bad in ("yes", 1, None)),
        ({"acceptance": "x"}, ArgumentError, "acceptance must be one of match, rejection, got 'x'"),
        ({"acceptance": None}, ArgumentError, "acceptance"),
        ({"acceptance": "rejection", "num_beams": 2}, UnsupportedError, "num_beams=2"),
        ({"num_beams": VOCAB + 1}, ArgumentError, f"num_beams={VOCAB + 1}"),
        ({"max_input_len": 0}, ArgumentError, "max_input_len"),
    ],
)
def test_what_cannot_be_is_refused_by_name(llama, arguments, error, named):
    with pytest.raises(error, match=named):
        DraftTarget.from_pretrained(llama, llama, **arguments)


class Lengths:
    """A policy that chooses how far a draft model drafts, one row at a time."""

    def __init__(self, cost: float, longest: int = 8, **settings: bool):
        """Let each draft take the time of `cost` undrafted steps."""
        self.by_length = {
            length: DraftModelProposer(None, 97, beams=1, depth=length, nodes=1 + length)
            for length in range(longest, 0, -1)
        }
        for proposer in self.by_length.values():
            object.__setattr__(proposer, "model", self)  # any object but None
        times = StepTimes(StepCosts(((1, 1.0),), ((1, cost),)), UndraftedProposer(), **settings)
        self.policy = CostPolicy(times, {1: list(self.by_length.values())}, always=True)

    def chosen(self) -> int:
        return self.policy.choose(StepRows(1, 1, 1)).depth

    def after(self, accepted: int, drafted: int, count: int = 40) -> int:
        for _ in range(count):
            self.policy.record(DraftedStep(StepRows(1, 1, 1), self.by_length[drafted], [accepted], [drafted]))
        return self.chosen()


def test_the_more_drafts_are_kept_and_the_less_they_cost_the_further_a_draft_model_drafts():
    assert Lengths(0.1).after(8, 8) == 8
    assert Lengths(0.1).after(0, 8) == 1
    assert 1 < Lengths(0.1).after(2, 8) < 8
    assert Lengths(1.5).after(8, 8) == 1  # a draft that costs more than it can bring
    assert Lengths(0.1).after(3, 3) == 8  # what was not drafted was not refused either


@pytest.mark.parametrize("accepted", [0, 8])
def test_steps_that_read_prompts_draft_one_length_whatever_is_accepted(accepted):
    lengths = Lengths(0.1)
    assert lengths.after(accepted, 8) == max(accepted, 1)
    assert lengths.policy.choose(StepRows(1, 1, 1, prompt_tokens=64)).depth == 4
    assert [each.depth for each in lengths.policy.choices(1, mixed=True)] == [4]


def test_how_long_ago_decides_what_a_draft_counts():
    lengths = Lengths(0.1)
    assert lengths.after(8, 8, 30) == 8
    chosen = [lengths.after(0, 8, 1) for _ in range(40)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 1


def test_measured_steps_decide_how_far_a_draft_model_drafts_though_none_is_undrafted():
    assert Lengths(0.02).after(4, 8) > 4, "drafts seem free"
    lengths = Lengths(0.02, corrected_every=1)
    lengths.after(4, 8)
    for _ in range(40):  # each draft takes as long as the target
        proposer = lengths.by_length[lengths.chosen()]
        lengths.policy.times.correct(1, proposer, 1.0 + proposer.depth)
    assert lengths.chosen() == 1
