"""The explanation of an acceptance: why each step ended, sums that are those of the replay, and what to type."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import pytest
import torch

from helpers.chats import CHAT, tiny_tokenizer, write
from helpers.models import VOCAB, tiny_drafter, tiny_model
from redrafter.cli import main
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.errors import ArgumentError, MismatchError
from redrafter.model.target import Target
from redrafter.train.evaluate import texts as texts_module
from redrafter.train.evaluate.explain import (
    Outcome,
    Steps,
    base_probabilities,
    best_guess_share,
    bucket_drafts,
    classify,
    count_misses,
    describe_drafts,
    explain_temperature,
    mean_margin,
    trace_steps,
)
from redrafter.train.evaluate.options import EvaluateOptions, Search
from redrafter.train.evaluate.replay import replay
from redrafter.train.evaluate.report import MISS_NAMES, advise, format_explanation
from redrafter.train.evaluate.texts import PromptSource, Texts, read_training_texts, write_texts
from redrafter.tree.sizes import TreeShape

# Counts of tensors


def test_a_draft_is_described_by_the_token_at_its_place():
    """Two steps of the second text: one draft accepted and one missed, then one missed."""
    steps = Steps(*torch.tensor([[1, 1], [2, 4], [3, 1], [1, 0], [1, 0], [0, 0]]))
    probabilities = [torch.tensor([1.0, 0.9]), torch.tensor([1.0, 0.1, 0.2, 0.3, 0.4, 0.5])]
    probability, context, accepted = describe_drafts(steps, probabilities, depth=3)
    assert probability.tolist() == pytest.approx([0.3, 0.4, 0.5])
    assert context.tolist() == [3, 4, 5]
    assert accepted.tolist() == [True, False, False]


def test_buckets_count_drafts_and_accepted_ones():
    value, accepted = torch.tensor([0.4, 0.5, 0.6, 1.0]), torch.tensor([False, False, True, True])
    assert bucket_drafts("abc", value, accepted, torch.tensor((0.5, 0.9))) == buckets(a=(1, 0), b=(2, 1), c=(1, 1))


# Steps of constructed drafters


def fond_drafter(monkeypatch, head: int | None = None) -> RecurrentDrafter:
    """Make a drafter that likes small ids best, whose search of 2x2 finds the drafts 0, 1, then 0 0 and 1 0.

    Args:
        monkeypatch: Pytest's fixture.
        head: Tokens that it knows, the smallest ids; None for all.
    """
    drafter = tiny_drafter(draft_vocab_size=head)
    falling = -torch.arange(head or VOCAB, dtype=torch.float)

    def step(embedding, state, hidden, read, embedded):
        logits = falling if state is None else 2 * falling
        return logits.expand(*embedding.shape[:-1], -1), embedding

    monkeypatch.setattr(drafter, "step", step)
    return drafter


@pytest.mark.parametrize(
    "continuation, nodes, head, outcome, accepted",
    [
        ([5, 50], 5, 8, Outcome.OUTSIDE_HEAD, 0),
        ([5, 0, 8], 5, 8, Outcome.OUTSIDE_HEAD, 1),
        ([5, 0, 7], 5, 8, Outcome.WRONG_GUESS, 1),
        ([5, 3], 5, None, Outcome.NEAR_MISS, 0),
        ([5, 4], 5, None, Outcome.WRONG_GUESS, 0),
        ([5, 0, 1], 5, None, Outcome.NEAR_MISS, 1),
        ([5, 1], 5, None, Outcome.TEXT_ENDED, 1),
        ([5, 1], 2, None, Outcome.NODE_BUDGET, 0),
        ([5, 1, 0], 5, None, Outcome.ALL_ACCEPTED, 2),
        ([5, 0, 0], 5, None, Outcome.ALL_ACCEPTED, 2),
        ([5, 0, 0], 2, None, Outcome.NODE_BUDGET, 1),
    ],
)
def test_each_class_of_misses_comes_from_its_cause(monkeypatch, continuation, nodes, head, outcome, accepted):
    """One step, from a prompt of one token."""
    target, shape = Target(tiny_model("llama")), TreeShape(2, 2, nodes)
    texts = Texts([[9, *continuation]], [1], [False])
    found = explain_temperature(fond_drafter(monkeypatch, head), target, texts, shape, {"all": 1})["all_steps"]
    tried = min(accepted + 1, 2, len(continuation) - 1)
    missed = {(at, name) for at, depth in enumerate(found["misses"]) for name, count in depth.items() if count}
    assert found["steps"] == 1
    assert found["tried"] == [int(depth < tried) for depth in (0, 1)]
    assert found["accepted"] == [int(depth < accepted) for depth in (0, 1)]
    assert found["all_accepted"] == (outcome == Outcome.ALL_ACCEPTED)
    assert found["text_ended"] == (outcome == Outcome.TEXT_ENDED)
    assert missed == ({(accepted, outcome.name.lower())} if outcome < Outcome.ALL_ACCEPTED else set())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [TreeShape(3, 4, 13), TreeShape(3, 4, 6), TreeShape(1, 3, 4)])
@pytest.mark.parametrize("head", [None, 40])
def test_traced_steps_are_those_of_the_replay(head, shape, temperature):
    target, drafter = Target(tiny_model("llama")), tiny_drafter(draft_vocab_size=head)
    texts = write_texts(target, [[5], [6, 7, 8], [9, 10]], 30, temperature, seed=3, end_ids=[2, 11, 12])
    steps = trace_steps(drafter, target, texts, shape)
    for index, stats in enumerate(replay(drafter, target, texts, [shape])[0]):
        own = steps.accepted[steps.text == index]
        assert len(own) == stats.steps
        assert [int((own > depth).sum()) for depth in range(shape.depth)] == stats.accepted_by_depth
    outcome = classify(steps, shape.beams, shape.depth)
    assert ((outcome == Outcome.OUTSIDE_HEAD).any()) == (head is not None)
    if shape.nodes == shape.lattice:
        assert not (outcome == Outcome.NODE_BUDGET).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", [{}, {"context_window": 9, "context_head_dim": 8}], ids=["published", "context"])
def test_a_rank_is_that_of_the_search(form, temperature):
    """The search of one beam drafts the token of rank 0 at every depth, and no other."""
    target, drafter = Target(tiny_model("llama")), tiny_drafter(**form)
    torch.manual_seed(0)
    for weight in drafter.parameters():  # so large that the recurrence matters, so small that guesses are often right
        torch.nn.init.normal_(weight, std=0.15)
    if drafter.context is not None:
        torch.nn.init.normal_(drafter.context.out.weight, std=0.5)  # or nothing that is read would show
    texts = write_texts(target, [[token] for token in range(5, 25)], 60, temperature, seed=3)
    steps = trace_steps(drafter, target, texts, TreeShape(1, 3, 3))
    missed = steps.accepted < steps.left.clamp(max=3)
    assert ((steps.rank == 0) == (steps.searched > steps.accepted))[missed].all()
    if temperature:
        assert (missed & (steps.rank == 0) & (steps.accepted == 2)).any()
        assert (missed & (steps.rank > 0) & (steps.accepted > 0)).any()


def test_texts_that_ended_at_once_have_no_steps():
    target, texts = Target(tiny_model("llama")), Texts([[5, 6], [7, 8, 9]], [1, 2], [True, True])
    steps = trace_steps(tiny_drafter(), target, texts, TreeShape(2, 2, 5))
    assert [len(found) for found in describe_drafts(steps, base_probabilities(target, texts), 2)] == [0, 0, 0]
    assert count_misses(classify(steps, 2, 2), steps.accepted, 2).tolist() == [[0] * 4] * 2


def test_best_guesses_are_counted_at_every_position_without_noise(monkeypatch):
    """Count right guesses of a drafter that always guesses 0 best, along texts that claim to be sampled."""
    target, sampled = Target(tiny_model("llama")), {"temperature": 1.0, "seeds": [1, 2]}
    shares = partial(best_guess_share, fond_drafter(monkeypatch), target)
    texts = Texts([[9, 5, 0, 0, 7, 0], [9, 5, 5, 0]], [1, 2], [False, False], **sampled)
    # Behind the pending tokens 5, 0, 0, 7: 0 0 7, 0 7 0, 7 0, 0. Behind the second text's 5: 0.
    assert shares(texts, 5) == [4 / 5, 2 / 3, 1 / 2, 1, None]
    assert shares(Texts([[9] + [0] * 40], [1], [False], **sampled), 2) == [1, 1]


@pytest.mark.parametrize("temperature, divisor", [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
def test_the_base_s_probabilities_are_those_of_its_logits(temperature, divisor):
    model = tiny_model("llama")
    texts = Texts([[5, 6, 7, 8], [9, 10]], [1, 1], [False, False], temperature)
    for ids, found in zip(texts.tokens, base_probabilities(Target(model), texts), strict=True):
        logits = model(torch.tensor([ids])).logits[0, :-1] / divisor
        expected = logits.softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(found, torch.cat([torch.ones(1), expected]), atol=1e-5, rtol=1e-4)


def test_a_context_counts_the_tokens_before_a_draft():
    """Drafts of a head that lacks the text's tokens, behind 256 tokens and more."""
    model = tiny_model("llama", max_position_embeddings=600)
    texts = Texts([[5] * 255 + [60] * 5], [255], [False])
    found = explain_temperature(tiny_drafter(draft_vocab_size=8), Target(model), texts, TreeShape(2, 2, 5), {"all": 1})
    assert found["by_context"][:2] == buckets(**{"up to 256": (1, 0), "up to 512": (3, 0)})
    assert not any(bucket["drafts"] for bucket in found["by_context"][2:])
    assert sum(depth["outside_head"] for depth in found["all_steps"]["misses"]) == found["all_steps"]["steps"] == 4


# Texts to compare with


def test_training_texts_are_the_learnt_parts_with_all_before_them(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [CHAT, {"text": "held out", "split": "val"}]
    texts, _ = read_training_texts([write(tmp_path / "rows.jsonl", rows)], tokenizer, 300, None, 0, [0])
    learnt = sorted(map(tokenizer.decode, texts.continuations))
    assert learnt == ["<t>hm</t>yes</s>\n", "no</s>\n"]
    prompts = [tokenizer.decode(text[:begin]) for text, begin in zip(texts.tokens, texts.prompt_lengths, strict=True)]
    assert all(prompt.endswith("<|assistant|>\n") for prompt in prompts)
    with pytest.raises(ArgumentError, match="no row to train on"):
        read_training_texts([write(tmp_path / "val.jsonl", rows[1:])], tokenizer, 300, None, 0, [0])


def test_training_texts_fit_the_context_and_are_chosen_by_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(texts_module, "TRAINING_TEXTS", 3)
    data = [write(tmp_path / "rows.jsonl", [{"text": str(n) * 20} for n in range(9)])]
    read = [read_training_texts(data, tiny_tokenizer(), 300, 12, seed, [0])[0] for seed in (0, 0, 1)]
    assert read[0] == read[1] != read[2]
    assert len(read[0].tokens) == 3
    assert max(map(len, read[0].tokens)) == 12
    with pytest.raises(MismatchError, match="the base knows 10 ids"):
        read_training_texts(data, tiny_tokenizer(), 10, None, 0, [0])


def test_data_compare_with_texts_of_the_same_temperature(tmp_path):
    """Rows that a base wrote record their temperature; a corpus compares with what is sampled."""
    rows = [{"text": f"{n} drawn at {n % 3}", "temperature": [0, 0.7, 1.0][n % 3]} for n in range(30)]
    own, corpus = write(tmp_path / "own.jsonl", rows), write(tmp_path / "corpus.jsonl", [{"text": "a text"}])
    tokenizer, found = tiny_tokenizer(), {}
    for temperatures in ((0, 1), (0, 0.7), (0,)):
        texts, recorded = read_training_texts([own], tokenizer, 300, None, 0, temperatures)
        found[temperatures] = texts.temperature, {tokenizer.decode(text)[-1] for text in texts.tokens}
        assert recorded
    assert found == {(0, 1): (1.0, {"2"}), (0, 0.7): (0.7, {"1"}), (0,): (0, {"0"})}
    with pytest.raises(ArgumentError, match=r"at temperature 0 or 0.7 or 1, .* add it to --temperatures 0.5"):
        read_training_texts([own], tokenizer, 300, None, 0, (0.5,))
    for temperatures, nearest in (((0, 0.9, 3), 0.9), ((0,), 0)):
        texts, recorded = read_training_texts([corpus], tokenizer, 300, None, 0, temperatures)
        assert (texts.temperature, recorded) == (nearest, False)


@pytest.mark.parametrize(
    "row, text",
    [("why?", "why?"), ({"text": "why is it so?"}, "why is"), ({"messages": CHAT["conversations"][:2]}, "hi")],
)
def test_a_prompt_of_either_kind_is_made_in_both_forms(tmp_path, row, text):
    tokenizer = tiny_tokenizer()
    files = [write(tmp_path / "rows.jsonl", [json.dumps(row)])]
    [plain], [templated] = PromptSource(files, tokenizer, share=0.5).in_both_forms(99)
    assert plain == tokenizer(text).input_ids
    assert tokenizer.decode(templated) == f"<s><|user|>\n{text}\n<|assistant|>\n"


def test_both_forms_are_made_of_few_prompts_that_fit_and_need_a_template(tmp_path):
    files = [write(tmp_path / "rows.jsonl", [{"prompt": "x" * n} for n in range(1, 60)])]
    plain, templated = PromptSource(files, tiny_tokenizer()).in_both_forms(50)
    assert len(plain) == len(templated) == texts_module.FORM_PROMPTS
    assert max(map(len, templated)) <= 50
    assert PromptSource(files, tiny_tokenizer(None)).in_both_forms(50) == ([], [])


# Advice


def buckets(**drafts: tuple[int, int]) -> list[dict]:
    """Return buckets of drafts and accepted ones by name."""
    return [{"name": name, "drafts": count, "accepted": hit} for name, (count, hit) in drafts.items()]


def missed(**counts: int) -> dict:
    """Return steps of which some missed, by class, and the others of 100 accepted all drafts."""
    misses, accepted = dict.fromkeys(MISS_NAMES, 0) | counts, 100 - sum(counts.values())
    ends = {"all_accepted": accepted, "text_ended": 0, "misses": [misses]}
    return {"steps": 100, "tried": [100], "accepted": [accepted]} | ends


def form(per_step: float | None) -> dict:
    return {"steps": 50, "tokens_per_step": per_step, "margin": 0.25, "acceptance": [0.5]}


def explanation(sampled: dict | None = None, **changes: object) -> dict:
    """Make an explanation that finds no cause, but for `sampled` at temperature 0.8, and `changes` of it all."""
    measured = {
        "tokens_per_step": 2.0, "margin": None, "all_steps": missed(wrong_guess=100), "categories": {},
        "best_guess": [0.5],
        "by_probability": buckets(a=(200, 100), b=(200, 100), c=(200, 100)),
        "by_context": buckets(**{"up to 256": (200, 100), "up to 512": (200, 100), "above 8192": (9, 0)}),
    }  # fmt: skip
    return {
        "tree": "2x1, 2 nodes", "prompts": 30,
        "beams": 2, "depth": 1, "nodes": 2, "lattice": 3, "head": 40, "vocabulary": 97,
        "temperatures": [measured | {"temperature": 0.0}, measured | {"temperature": 0.8} | (sampled or {})],
        "data": ["a.jsonl"], "best_guess_on_data": [0.5], "data_has_temperature": False, "data_temperature": 0.8,
        "form_prompts": 30, "plain": form(2.0), "template": form(2.0),
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"sampled": {"all_steps": missed(outside_head=80, near_miss=20)}},
         "80% of the misses at temperature 0.8 are tokens that the drafter's head lacks: it has 40 of 97: redrafter "
         "train --draft-vocab-size 80 "),
        ({"sampled": {"all_steps": missed(near_miss=100)}},
         "redrafter evaluate --shapes 4x1, and if that pays --num-beams 4"),
        ({"sampled": {"all_steps": missed(wrong_guess=100)}}, "redrafter regenerate --data prompts.jsonl"),
        ({"sampled": {"all_steps": missed(node_budget=100)}}, "nodes are: --node-budget 3"),
        ({"sampled": {"all_steps": missed(wrong_guess=60)}},
         "40% of the steps accepted all 1 drafts: redrafter evaluate --shapes 2x4, and if that pays "
         "--draft-len-per-beam 4"),
        ({"sampled": {"tokens_per_step": 1.7}},
         "greedy 2.00 tokens per step, at 0.8 1.70; sampled tokens are harder to guess: --temperature 0.4"),
        ({}, "temperature: greedy 2.00 tokens per step, at 0.8 2.00; it is not the cause"),
        ({"temperatures": explanation()["temperatures"][:1]}, "redrafter evaluate --temperatures 0,1"),
        ({"sampled": {"by_probability": buckets(a=(100, 20), b=(100, 80))}},
         "certainty: the base gave its own token less than 0.5 at 50% of the drafts, where 80% of the misses are; no "
         "drafter guesses such tokens well, a lower --temperature "),
        ({}, "at 33% of the drafts, where 33% of the misses are; it is not the cause"),
        ({"sampled": {"by_probability": buckets(a=(9, 9))}}, "certainty: no draft was missed"),
        ({"best_guess_on_data": [0.56]},
         "training data: first guesses are right for 56% of the data and 50% of the base's own text at temperature "
         "0.8: redrafter regenerate --data a.jsonl --output own.jsonl ..., redrafter train --data own.jsonl ..."),
        ({"best_guess_on_data": [0.56], "data": ["own.jsonl", "own-2.jsonl"]},
         "regenerate --data own.jsonl own-2.jsonl --output own-3.jsonl ..., redrafter train --data own-3.jsonl ..."),
        ({"best_guess_on_data": [0.56], "data": ["own.jsonl"], "data_has_temperature": True},
         "the base's own text, both at temperature 0.8: it memorised these rows, so add others: redrafter "
         "regenerate --data prompts.jsonl --output own-2.jsonl ..., redrafter train --data own.jsonl own-2.jsonl ..."),
        ({"best_guess_on_data": [0.56], "sampled": {"best_guess": [0.4]}, "data_temperature": 0.0},
         "56% of the data and 50% of the base's own text at temperature 0: "),
        ({}, "50% of the data and 50% of the base's own text at temperature 0.8; it is not the cause"),
        ({"best_guess_on_data": None}, "redrafter evaluate --explain --data FILE"),
        ({"best_guess_on_data": [None]}, "training data: no text is long enough"),
        ({"template": form(3.0)}, "3.00 ± 0.25 after the same as a user's turn: send chats"),
        ({"template": form(2.4)}, "2.40 ± 0.25 after the same as a user's turn; it is not the cause"),
        ({"plain": form(3.0)}, "the drafter does not know chats: redrafter train --data chats.jsonl"),
        ({}, "2.00 ± 0.25 tokens per step after plain prompts, 2.00 ± 0.25 after the same as a user's turn; it is not"),
        ({"plain": None, "template": None}, "chat template: not compared: the base has none"),
        ({"plain": form(None)}, "chat template: not compared: the base ended all texts at once"),
        ({"sampled": {"by_context": buckets(**{"up to 256": (200, 100), "up to 512": (100, 30)})}},
         "context: acceptance is 0.500 after up to 256 tokens, 0.300 after up to 512: redrafter train --length"),
        ({}, "context: acceptance is 0.500 after up to 256 tokens, 0.500 after up to 512; it is not the cause"),
        ({"sampled": {"by_context": []}},
         "drafts follow about the same number of tokens; to compare: redrafter evaluate --prompt-lengths 256,1024"),
    ],
)  # fmt: skip
def test_each_cause_has_a_line_that_says_what_to_type(changes, said):
    assert any(said in line for line in advise(explanation(**changes))), list(advise(explanation(**changes)))


def test_few_prompts_give_no_conclusion():
    changes = {"best_guess_on_data": [0.9], "data_has_temperature": True, "plain": form(3.0)}
    few = list(advise(explanation({"tokens_per_step": 1.0}, prompts=29, form_prompts=29, **changes)))
    assert sum("29 prompts are too few to conclude, give 30 or more" in line for line in few) == 5
    assert not any(verdict in line for line in few for verdict in ("memorised", "know chats", "not the cause"))


def test_a_margin_is_of_texts_and_not_of_their_steps():
    assert mean_margin([2, 2], [1, 1]) == 0
    assert mean_margin([1, 3], [1, 1]) == pytest.approx(1.96)  # the standard error is 1
    assert mean_margin([100, 300], [100, 100]) == pytest.approx(1.96)
    assert mean_margin([3], [1]) is None


def test_what_is_rare_gets_no_line():
    lines = list(advise(explanation({"all_steps": missed(wrong_guess=91, node_budget=9)})))
    assert not any("--node-budget" in line or "accepted all" in line for line in lines)


def test_texts_without_a_step_are_explained():
    counts = {"steps": 0, "all_accepted": 0, "text_ended": 0, "misses": [{}], "tried": [0], "accepted": [0]}
    none = {"temperature": 0.0, "tokens_per_step": None, "all_steps": counts, "by_context": [], "best_guess": [None]}
    none["margin"] = None
    none["by_probability"] = buckets(a=(0, 0))
    changes = {"plain": None, "template": None, "form_prompts": 0, "data_temperature": 0.0}
    assert len(list(advise(explanation(temperatures=[none], **changes)))) == 5


def test_tables_have_a_column_for_each_class():
    misses = {"outside_head": 11, "near_miss": 12, "wrong_guess": 13, "node_budget": 9}
    counts = {"steps": 50, "all_accepted": 3, "text_ended": 2, "misses": [misses], "tried": [48], "accepted": [3]}
    shown = explanation({"all_steps": counts, "categories": {"chat": counts}}) | {"advice": []}
    lines = [line.split() for line in format_explanation(shown)]
    assert ["1", "48", "3", "11", "12", "13", "9"] in lines
    assert ["chat", "50", "11", "12", "13", "9", "3", "2"] in lines


# The command


@pytest.fixture(scope="module")
def explained(tmp_path_factory) -> tuple[dict, str]:
    """Run the command on the boxed pair. Returns its document and what it printed."""
    folder = tmp_path_factory.mktemp("explain")
    rows = [{"text": f"{n} men went to mow, went to mow a meadow", "source": f"kind {n % 2}"} for n in range(3)]
    write(folder / "rows.jsonl", rows)
    words = "--prompts rows.jsonl --data rows.jsonl --new-tokens 24 --temperatures 0.9 --shapes 5x3 --json out.json"
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(io.StringIO()):
        patch.chdir(folder)
        assert main(["evaluate", "--explain", *words.split(), "--device", "cpu"]) == 0
    return json.loads((folder / "out.json").read_text()), out.getvalue()


def test_the_explanation_adds_up_to_the_steps_of_the_replay(explained):
    document, _ = explained
    found = document["explanation"]
    assert found["tree"] == "5x3, 12 nodes"
    assert [one["temperature"] for one in found["temperatures"]] == [0, 0.9]
    for one, measured in zip(found["temperatures"], document["temperatures"], strict=True):
        [tree] = [tree for tree in measured["trees"] if tree["tree"] == found["tree"]]
        assert one["tokens_per_step"] == tree["all_steps"]["tokens_per_step"]
        by_category = [(counts, tree["categories"][name]) for name, counts in one["categories"].items()]
        for counts, steps in [(one["all_steps"], tree["all_steps"]), *by_category]:
            assert counts["steps"] == steps["steps"] > 0
            tried, accepted = steps["tried_by_depth"], steps["accepted_by_depth"]
            assert (counts["tried"], counts["accepted"]) == (tried, accepted)
            misses = [sum(depth.values()) for depth in counts["misses"]]
            assert sum(misses) + counts["all_accepted"] + counts["text_ended"] == steps["steps"]
            assert misses == [a - b for a, b in zip(tried, accepted, strict=True)]
        for some in (one["by_probability"], one["by_context"]):
            assert sum(bucket["drafts"] for bucket in some) == sum(tree["all_steps"]["tried_by_depth"])
            assert sum(bucket["accepted"] for bucket in some) == sum(tree["all_steps"]["accepted_by_depth"])


@pytest.mark.parametrize(
    "options, tree",
    [
        ({}, TreeShape(5, 4, 12)),
        ({"node_budgets": (7,)}, TreeShape(5, 4, 7)),
        ({"shapes": (Search(2, 3),)}, TreeShape(2, 3, 7)),
        ({"shapes": (Search(2, 3),), "node_budgets": (4,)}, TreeShape(2, 3, 4)),
    ],
)
def test_the_tree_that_is_explained_is_the_one_that_generate_would_verify(options, tree):
    assert EvaluateOptions(explain=True, **options).explained_tree(Search(5, 4), torch.device("cpu")) == tree


def test_the_output_shows_the_causes_and_what_to_type(explained):
    document, out = explained
    found = document["explanation"]
    assert out.count("why drafts were missed: 5x3, 12 nodes, temperature 0") == 2
    assert out.endswith("".join(f"  {line}\n" for line in found["advice"]))
    assert "  rows.jsonl  " in out
    assert (found["data"], found["form_prompts"]) == (["rows.jsonl"], 3)
    assert all(f"{found[name]['tokens_per_step']:.3f}" in out for name in ("plain", "template"))
    names = ("temperature", "certainty", "training data", "chat template", "context")
    assert all(any(line.startswith(name) for line in found["advice"]) for name in names)
