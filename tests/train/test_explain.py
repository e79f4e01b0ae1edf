"""The explanation of an acceptance adds up to the steps of the replay, and says what to type."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from helpers.chats import CHAT, tiny_tokenizer, write
from helpers.models import tiny_drafter, tiny_model
from redrafter.cli import main
from redrafter.errors import ArgumentError, MismatchError
from redrafter.model.target import Target
from redrafter.train.evaluate import texts as texts_module
from redrafter.train.evaluate.explain import (
    Bucket,
    Explanation,
    Form,
    StepCounts,
    TemperatureExplanation,
    explain_temperature,
)
from redrafter.train.evaluate.misses import MISSES
from redrafter.train.evaluate.options import EvaluateOptions, Search
from redrafter.train.evaluate.replay import Shape
from redrafter.train.evaluate.report import advise, describe_explanation, format_explanation
from redrafter.train.evaluate.texts import Texts, prompts_in_both_forms, read_training_texts

# Texts to compare with


def test_training_texts_are_the_learnt_parts_with_all_before_them(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [CHAT, {"text": "held out", "split": "val"}]
    texts = read_training_texts([write(tmp_path / "rows.jsonl", rows)], tokenizer, 300, None, 0)
    learnt = sorted(map(tokenizer.decode, texts.continuations))
    assert learnt == ["<t>hm</t>yes</s>\n", "no</s>\n"]
    prompts = [tokenizer.decode(text[:begin]) for text, begin in zip(texts.tokens, texts.prompt_lengths, strict=True)]
    assert all(prompt.endswith("<|assistant|>\n") for prompt in prompts)


def test_training_texts_fit_the_context_and_are_chosen_by_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(texts_module, "TRAINING_TEXTS", 3)
    data = [write(tmp_path / "rows.jsonl", [{"text": str(n) * 20} for n in range(9)])]
    read = [read_training_texts(data, tiny_tokenizer(), 300, 12, seed) for seed in (0, 0, 1)]
    assert read[0] == read[1] != read[2]
    assert len(read[0].tokens) == 3
    assert max(map(len, read[0].tokens)) == 12
    with pytest.raises(MismatchError, match="the base knows 10 ids"):
        read_training_texts(data, tiny_tokenizer(), 10, None, 0)


def test_data_without_a_row_to_train_on_is_refused(tmp_path):
    data = write(tmp_path / "rows.jsonl", [{"text": "held out", "split": "val"}])
    with pytest.raises(ArgumentError, match="no row to train on"):
        read_training_texts([data], tiny_tokenizer(), 300, None, 0)


@pytest.mark.parametrize(
    "row, text",
    [
        ("why?", "why?"),
        ({"text": "why is it so?"}, "why is"),
        ({"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]}, "why?"),
    ],
)
def test_a_prompt_of_either_kind_is_made_in_both_forms(tmp_path, row, text):
    tokenizer = tiny_tokenizer()
    files = [write(tmp_path / "rows.jsonl", [json.dumps(row)])]
    [plain], [templated] = prompts_in_both_forms(files, tokenizer, 99, 0, share=0.5)
    assert plain == tokenizer(text).input_ids
    assert tokenizer.decode(templated) == f"<s><|user|>\n{text}\n<|assistant|>\n"


def test_both_forms_are_made_of_few_prompts_that_fit_and_need_a_template(tmp_path):
    rows = [{"prompt": "x" * n} for n in range(1, 40)]
    files = [write(tmp_path / "rows.jsonl", rows)]
    plain, templated = prompts_in_both_forms(files, tiny_tokenizer(), 30, 0)
    assert len(plain) == len(templated) == texts_module.FORM_PROMPTS
    assert max(map(len, templated)) <= 30
    assert prompts_in_both_forms(files, tiny_tokenizer(None), 30, 0) == ([], [])


# Advice


def explanation(**changes: object) -> Explanation:
    """Make an explanation that finds no cause, but for `changes`."""
    misses = {miss.name.lower(): 0 for miss in MISSES}
    counts = StepCounts(100, 0, 0, [misses | {"wrong_guess": 100}], [100], [0])
    flat = [Bucket(name, 200, 100) for name in ("below 0.5", "0.5 to 0.9", "0.9 or more")]
    contexts = [Bucket("up to 256", 200, 100), Bucket("up to 512", 200, 100), Bucket("above 8192", 9, 0)]
    measured = [TemperatureExplanation(t, 2.0, counts, {}, flat, contexts, [0.5]) for t in (0.0, 0.8)]
    form = Form(50, 2.0, [0.5])
    facts = {
        "tree": "2x1, 2 nodes", "beams": 2, "depth": 1, "nodes": 2, "lattice": 3, "head": 40, "vocabulary": 97,
        "temperatures": measured, "data": ["a.jsonl"], "best_guess_on_data": [0.5], "form_prompts": 8, "plain": form,
        "template": form,
    }  # fmt: skip
    return Explanation(**(facts | changes))


def at_temperature(**changes: object) -> list[TemperatureExplanation]:
    """Return what was measured greedily and at 0.8, of which `changes` are at 0.8."""
    greedy, sampled = explanation().temperatures
    return [greedy, replace(sampled, **changes)]


def missed(**counts: int) -> StepCounts:
    """Return steps of which some missed, by class, and the others of 100 accepted all drafts."""
    misses = {miss.name.lower(): 0 for miss in MISSES} | counts
    total = sum(counts.values())
    return StepCounts(100, 100 - total, 0, [misses], [100], [100 - total])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"temperatures": at_temperature(all_steps=missed(outside_head=80, near_miss=20))},
         "80% of the misses at temperature 0.8 are tokens that the drafter's head lacks: it has 40 of 97: redrafter "
         "train --draft-vocab-size 80 "),
        ({"temperatures": at_temperature(all_steps=missed(near_miss=100))}, "redrafter evaluate --shapes 4x1"),
        ({"temperatures": at_temperature(all_steps=missed(near_miss=100))}, "--num-beams 4"),
        ({"temperatures": at_temperature(all_steps=missed(wrong_guess=100))}, "redrafter regenerate --data"),
        ({"temperatures": at_temperature(all_steps=missed(node_budget=100))}, "redrafter tune, or --node-budget 3"),
        ({"temperatures": at_temperature(all_steps=missed(wrong_guess=60))},
         "40% of the steps accepted all 1 drafts: redrafter evaluate --shapes 2x4, and if that pays "
         "--draft-len-per-beam 4"),
        ({"temperatures": at_temperature(tokens_per_step=1.7)},
         "temperature: greedy 2.00 tokens per step, at 0.8 1.70; what is drawn is harder to guess: --temperature 0.4"),
        ({}, "temperature: greedy 2.00 tokens per step, at 0.8 2.00; it is not the cause"),
        ({"temperatures": at_temperature()[:1]}, "redrafter evaluate --temperatures 0,1"),
        ({"temperatures": at_temperature(by_probability=[Bucket("", 100, 20), Bucket("", 100, 80)])},
         "certainty: the base gave its own token less than 0.5 at 50% of the drafts, where 80% of the misses are; no "
         "drafter guesses such tokens well, a lower --temperature "),
        ({}, "at 33% of the drafts, where 33% of the misses are; it is not the cause"),
        ({"temperatures": at_temperature(by_probability=[Bucket("", 9, 9)])}, "certainty: no draft was missed"),
        ({"best_guess_on_data": [0.56]},
         "training data: first guesses are right for 56% of the data and 50% of the base's own text: redrafter "
         "regenerate --data a.jsonl --output own.jsonl ..., redrafter train --data own.jsonl ..."),
        ({}, "50% of the data and 50% of the base's own text; it is not the cause"),
        ({"best_guess_on_data": None}, "redrafter evaluate --explain --data FILE"),
        ({"best_guess_on_data": [None]}, "training data: no text is long enough"),
        ({"template": Form(9, 3.0, [0.9])}, "3.00 after the same as a user's turn: send chats"),
        ({"plain": Form(9, 3.0, [0.9])}, "the drafter does not know chats: redrafter train --data chats.jsonl"),
        ({}, "2.00 tokens per step after plain prompts, 2.00 after the same as a user's turn; it is not"),
        ({"plain": None, "template": None}, "chat template: not compared: the base has none"),
        ({"plain": Form(0, None, [None])}, "chat template: not compared: the base ended all texts at once"),
        ({"temperatures": at_temperature(by_context=[Bucket("up to 256", 200, 100), Bucket("up to 512", 100, 30)])},
         "context: acceptance is 0.500 behind up to 256 tokens, 0.300 behind up to 512: redrafter train --length"),
        ({}, "context: acceptance is 0.500 behind up to 256 tokens, 0.500 behind up to 512; it is not the cause"),
        ({"temperatures": at_temperature(by_context=[])},
         "drafts are behind about as many tokens; to compare: redrafter evaluate --prompt-lengths 256,1024"),
    ],
)  # fmt: skip
def test_each_cause_has_a_line_that_says_what_to_type(changes, said):
    assert any(said in line for line in advise(explanation(**changes))), list(advise(explanation(**changes)))


def test_what_is_rare_gets_no_line():
    changed = explanation(temperatures=at_temperature(all_steps=missed(wrong_guess=91, node_budget=9)))
    assert not any("redrafter tune" in line for line in advise(changed))
    assert not any("accepted all" in line for line in advise(changed))


def test_texts_without_a_step_are_explained():
    none = TemperatureExplanation(0.0, None, StepCounts(0, 0, 0, [{}], [0], [0]), {}, [Bucket("", 0, 0)], [], [None])
    lines = list(advise(explanation(temperatures=[none], plain=None, template=None, form_prompts=0)))
    assert len(lines) == 5


# The command


def test_a_context_counts_the_tokens_before_a_draft():
    """Drafts of a head that lacks the text's tokens, behind 256 tokens and more."""
    model = tiny_model("llama", max_position_embeddings=600)
    texts = Texts([[5] * 255 + [60] * 5], [255], [False])
    found = explain_temperature(tiny_drafter(draft_vocab_size=8), Target(model), texts, Shape(2, 2, 5), {"all": 1})
    assert [one for one in found.by_context if one.drafts] == [Bucket("up to 256", 1, 0), Bucket("up to 512", 3, 0)]
    assert found.all_steps.missed["outside_head"] == found.all_steps.steps == 4


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
        for counts, steps in [
            (one["all_steps"], tree["all_steps"]),
            *((counts, tree["categories"][name]) for name, counts in one["categories"].items()),
        ]:
            assert counts["steps"] == steps["steps"] > 0
            assert (counts["tried"], counts["accepted"]) == (steps["tried_by_depth"], steps["accepted_by_depth"])
            misses = [sum(depth.values()) for depth in counts["misses"]]
            assert sum(misses) + counts["all_accepted"] + counts["text_ended"] == steps["steps"]
            tried, accepted = steps["tried_by_depth"], steps["accepted_by_depth"]
            assert misses == [a - b for a, b in zip(tried, accepted, strict=True)]
        for buckets in (one["by_probability"], one["by_context"]):
            assert sum(bucket["drafts"] for bucket in buckets) == sum(tree["all_steps"]["tried_by_depth"])
            assert sum(bucket["accepted"] for bucket in buckets) == sum(tree["all_steps"]["accepted_by_depth"])


@pytest.mark.parametrize(
    "options, tree",
    [
        ({}, Shape(5, 4, 12)),
        ({"node_budgets": (7,)}, Shape(5, 4, 7)),
        ({"shapes": (Search(2, 3),)}, Shape(2, 3, 7)),
        ({"shapes": (Search(2, 3),), "node_budgets": (4,)}, Shape(2, 3, 4)),
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
    assert found["data"] == ["rows.jsonl"]
    assert found["form_prompts"] == 3
    for name in ("plain", "template"):
        assert f"{found[name]['tokens_per_step']:.3f}" in out
    names = ("temperature", "certainty", "training data", "chat template", "context")
    assert all(any(line.startswith(name) for line in found["advice"]) for name in names)


def test_tables_have_a_column_for_each_class():
    counts = StepCounts(
        50, 3, 2, [{"outside_head": 11, "near_miss": 12, "wrong_guess": 13, "node_budget": 9}], [48], [3]
    )
    one = replace(explanation().temperatures[0], all_steps=counts, categories={"chat": counts})
    document = json.loads(json.dumps(describe_explanation(explanation(temperatures=[one]))))
    lines = [line.split() for line in format_explanation(document)]
    assert ["1", "48", "3", "11", "12", "13", "9"] in lines
    assert ["chat", "50", "11", "12", "13", "9", "3", "2"] in lines
    assert asdict(one)["by_context"][0] == {"name": "up to 256", "drafts": 200, "accepted": 100}


@pytest.mark.parametrize(
    "words, said",
    [
        ("--data rows.jsonl", "--data is compared by --explain only: give --explain too, or leave --data out"),
        ("--explain --shapes 5x5,1x4", "--explain explains one tree: give one of --shapes, got 5x5,1x4"),
        ("--explain --node-budgets 5,6", "--explain explains one tree: give one of --node-budgets, got 5,6"),
        ("--explain --data gone.jsonl", "gone.jsonl cannot be read"),
        ("--explain --data val.jsonl", "--data val.jsonl: no row to train on; rows of split val and test are not"),
        ("--explain --data prompts.jsonl", "prompts.jsonl:1: a prompt without an answer"),
    ],
)
def test_what_cannot_be_explained_exits_with_2_and_one_line(tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    write(Path("val.jsonl"), [{"text": "held out", "split": "val"}])
    write(Path("prompts.jsonl"), ['"why?"'])
    assert main(["evaluate", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert said in err
