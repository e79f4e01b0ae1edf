"""`redrafter compare` in process, on a tiny pair and a tiny draft model."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.command_line import CONTEXT, TEXT, byte_tokenizer, fails, measured
from helpers.models import tiny_model
from helpers.tokenizers import TEXTS, byte_level, sentencepiece_like
from redrafter.cli import main
from redrafter.cli import measure as measure_module
from redrafter.measure.record import first_difference, tolerance
from redrafter.measure.trial import Trial
from redrafter.sampling.noise import gumbel
from redrafter.tree import report as report_module
from redrafter.tree.accept import Path as Kept

PROMPTS = ["ja", "Zürich", TEXT * 2, "10 €", "für"]
NEW = 16  # new tokens; more than the first runs write
WAYS = ["undrafted", "drafter", "draft model", "prompt lookup"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return str(file)


@pytest.fixture
def compare(folder, prompts):
    """Return a function that runs `redrafter compare`, whose exit code it checks, and returns its text and records."""

    def run(*args: str, model: str = "merged", draft_model: str | None = "small", code: int = 0) -> tuple[str, dict]:
        names = ["--model", str(folder / model), "--prompts", prompts, "--max-new-tokens", str(NEW)]
        names += [] if draft_model is None else ["--draft-model", str(folder / draft_model)]
        records, out = measured("compare", *names, *args, code=code)
        ways = [{"same": None, "differences": []} | record for record in records]
        return out, {"ways": ways, "by_way": {way["mode"]: way for way in ways}, **records[0]["conditions"]}

    return run


@pytest.fixture
def runs(monkeypatch):
    """Record mode, seed and result of every run but the warm-up runs; `patch(mode, run)` may replace the result."""
    kept, honest = [], Trial.run_batch
    monkeypatch.setattr(measure_module, "WARM_UP_TOKENS", 1)

    def run(self, batch, first, **changes):
        found = honest(self, batch, first, **changes)
        if not changes:
            found = kept.patch(self.mode, found)
            kept.append((self.mode, self.arguments["seed"] + first, found))
        return found

    class Runs(list):
        patch = staticmethod(lambda way, run: run)

        def texts(self, way: str) -> list[list[int]]:
            return [row for name, _, run in self if name == way for row in run.tokens]

    kept = Runs()
    monkeypatch.setattr(Trial, "run_batch", run)
    return kept


@pytest.mark.parametrize("size", [1, 3])
def test_every_way_is_a_line_of_the_table_and_a_record(compare, folder, prompts, size):
    table, document = compare("--batch-size", str(size))
    ways, longest = document["by_way"], len(byte_tokenizer()(TEXT * 2).input_ids)
    assert list(ways) == WAYS
    assert f"5 prompts of 3 to {longest} tokens, 0 longer" in table
    assert (document["model"], document["prompts"]) == ("merged", ["prompts.txt"])
    assert document["options"]["batch_size"] == size
    for line, (name, way) in zip(table.splitlines()[-4:], ways.items(), strict=True):
        assert line.startswith(f"  {name}  ")
        assert ("5 of 5" in line) == (name != "undrafted")
        assert way["tokens"] == 5 * NEW
        assert way["tokens_per_second"] == pytest.approx(way["tokens"] / way["seconds"])
        assert way["speedup"] == pytest.approx(ways["undrafted"]["seconds"] / way["seconds"])
        assert (way["same"], way["differences"]) == (None if name == "undrafted" else 5, [])
        assert sum(way["accepted_by_depth"]) == way["accepted"] <= way["drafted"]
        assert way["steps"] + way["accepted"] >= 5 * (NEW - 1)  # the last step may keep more than there is room for
    assert (ways["undrafted"]["steps"], ways["undrafted"]["drafted"]) == (5 * (NEW - 1), 0)
    assert 0 < ways["draft model"]["accepted"] < ways["draft model"]["drafted"]
    assert document["drafters"] == {
        "drafter": str(folder / "merged" / "drafter"),
        "draft model": str(folder / "small"),
        "prompt lookup": None,
    }


def test_a_way_that_there_is_nothing_for_is_left_out(compare, folder):
    one = ("--num-prompts", "1")
    assert list(compare(*one, model="base", draft_model=None)[1]["by_way"]) == [
        "undrafted",
        "recycled tokens",
        "prompt lookup",
    ]
    flags = ("--draft-len", "3", "--ngram", "4", "--draft-len-per-beam", "2", "--drafter", str(folder / "drafter"))
    document = compare(*one, *flags, model="base")[1]
    assert document["drafters"]["drafter"] == str(folder / "drafter")
    assert len(document["by_way"]["drafter"]["accepted_by_depth"]) >= 2


def test_each_batch_is_decoded_with_every_way_before_the_next(compare, runs):
    compare("--batch-size", "3", "--repeats", "2", "--num-prompts", "4", "--disable-output-comparison")
    found = [(way, len(run.tokens)) for way, _, run in runs]
    assert found == [(way, size) for ways in (WAYS, WAYS[::-1]) for size in (3, 1) for way in ways]


@pytest.mark.parametrize("seed", [("--seed", "7"), ()])
def test_a_sampled_text_is_the_same_whatever_the_batch_size(compare, runs, seed):
    texts = {}
    for size in (1, 3):
        runs.clear()
        _, document = compare("--temperature", "1", *seed, "--batch-size", str(size))
        assert {way["same"] for way in document["ways"][1:]} == {5}
        assert document["options"]["seed"] == (7 if seed else 0)
        texts[size] = [runs.texts(way) for way in WAYS]
    assert texts[1] == texts[3]
    assert all(text == texts[1][0] for text in texts[1])
    assert len(set(map(tuple, texts[1][0]))) == 5


def test_prompts_that_are_too_long_are_left_out_and_counted_and_outputs_need_not_be_compared(compare, runs):
    most = len(byte_tokenizer()("Zürich").input_ids)
    args = ("--max-input-len", str(most), "--num-prompts", "3", "--disable-output-comparison")
    table, document = compare(*args)
    assert f"3 prompts of 3 to {most} tokens, 1 longer ones left out" in table
    assert document["by_way"]["undrafted"]["texts"] == 3
    assert len(runs.texts("undrafted")) == 3
    assert {way["same"] for way in document["ways"]} == {None}
    assert "same texts" not in table


def test_rejection_promises_a_distribution_and_no_tokens(compare, runs):
    args = ("--acceptance", "rejection")
    assert [way["same"] for way in compare(*args, "--temperature", "1")[1]["ways"]] == [None, 5, None, 5]
    assert runs.texts("draft model") != runs.texts("undrafted")
    assert [way["same"] for way in compare(*args)[1]["ways"]] == [None, 5, 5, 5]


@pytest.mark.parametrize("asked", [True, False])
def test_a_way_that_writes_other_tokens_fails_and_the_report_says_where(compare, runs, monkeypatch, asked):
    honest = report_module.accept

    def keep_everything(tree, drawn, max_depth, *limits):
        path = honest(tree, drawn, max_depth, *limits)
        if max_depth == 0 or tree.tokens.shape[1] != max_depth + 1:  # undrafted decoding, or too small a tree
            return path
        nodes = path.nodes.new_tensor(range(max_depth + 1)).expand_as(path.nodes)
        return Kept(nodes, path.accepted * 0 + max_depth)

    monkeypatch.setattr(report_module, "accept", keep_everything)
    off = () if asked else ("--disable-output-comparison",)
    flags = ("--batch-size", "3", "--no-draft-from-text", *off)
    table, document = compare(*flags, model="base", code=int(asked))
    plain = runs.texts("undrafted")
    for name in ("draft model", "prompt lookup"):
        way, texts = document["by_way"][name], runs.texts(name)
        found = [first_difference(mine, theirs) for mine, theirs in zip(plain, texts, strict=True)]
        row = next(row for row, at in enumerate(found) if at is not None)
        others = len(found) - found.count(None)
        assert way["same"] == (found.count(None) if asked else None)
        line = f"  OTHER TOKENS in prompt {row + 1} at new token {found[row] + 1}: the lower is "
        assert (line in table) == asked
        assert len(way["differences"]) == (others if asked else 0)
        assert table.count("OTHER TOKENS") <= 3 * 3  # of three ways that draft
        assert (f"  and {others - 3} more" in table) == (asked and others > 3)


def test_a_difference_is_counted_by_prompt_across_batches(compare, runs):
    def patch(way, run):
        if way != "prompt lookup" or len(run.tokens) != 2:  # the second batch
            return run
        first, second = run.tokens
        return replace(run, tokens=[first, [*second[:3], second[3] + 1, *second[4:]]])

    runs.patch = patch
    table, document = compare("--batch-size", "3", code=1)
    assert [way["same"] for way in document["ways"]] == [None, 5, 5, 4]
    *_, where, plain, other = table.splitlines()
    assert "4 of 5" in table
    assert where.startswith("  OTHER TOKENS in prompt 5 at new token 4: the lower is ")
    [found] = document["ways"][-1]["differences"]
    text = runs.texts("undrafted")[4]
    assert (found["prompt"], found["token"], found["undrafted"], found["other"]) == (4, 3, text[3], text[3] + 1)
    decode = byte_tokenizer().decode
    assert found["common"] == decode(text[:3])
    assert found["common"] + found["undrafted_text"] == decode(text)
    assert not found["near_tie"]
    assert found["margin"] > found["tolerance"] == 1e-4
    for line, name, which in ((plain, "undrafted", "undrafted"), (other, "prompt lookup", "other")):
        shown = (json.dumps(part, ensure_ascii=False)[1:-1] for part in (found["common"], found[f"{which}_text"]))
        assert line == f"    {name:<13}  {'»'.join(shown)}  (id {found[which]})"


@pytest.fixture(scope="module")
def tied(folder, tmp_path_factory) -> tuple[str, int, int]:
    """Return a model whose head has equal rows for two ids, and these ids; greedy decoding takes the first."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    first, second = sorted(byte_tokenizer()("A ", add_special_tokens=False).input_ids)
    with torch.no_grad():
        model.get_output_embeddings().weight[first] = model.get_output_embeddings().weight[second]
    where = tmp_path_factory.mktemp("tied")
    model.save_pretrained(where)
    byte_tokenizer().save_pretrained(where)
    return str(where), first, second


def swapped(first: int, second: int, *, row_from: int = 0):
    """Return a patch that replaces the first occurrence of one id by another, in outputs of prompt lookup."""

    def patch(way, run):
        for row, text in enumerate(run.tokens):
            if way == "prompt lookup" and first in text and row >= row_from:
                changed = [*text]
                changed[text.index(first)] = second
                return replace(run, tokens=[*run.tokens[:row], changed, *run.tokens[row + 1 :]])
        return run

    return patch


def test_a_near_tie_is_counted_apart_and_does_not_fail(compare, runs, tied):
    model, first, second = tied
    runs.patch = swapped(first, second)
    table, document = compare("--model", model, "--batch-size", "5", draft_model=None)
    lookup = document["by_way"]["prompt lookup"]
    assert (lookup["same"], lookup["near_ties"]) == (4, 1)
    [found] = lookup["differences"]
    assert found["near_tie"]
    assert found["margin"] == 0
    assert {found["undrafted"], found["other"]} == {first, second}
    assert "4 of 5, 1 near-ties" in table
    assert "  near-tie in prompt" in table
    assert "OTHER TOKENS" not in table


def test_the_noise_of_a_sampled_text_is_part_of_its_margin(compare, runs, tied):
    """Two equal logits are no tie under noise that is not."""
    model, first, second = tied
    runs.patch = swapped(first, second, row_from=1)
    args = ("--model", model, "--batch-size", "5", "--temperature", "1", "--seed", "5")
    [found] = compare(*args, draft_model=None, code=1)[1]["by_way"]["prompt lookup"]["differences"]
    row = found["prompt"]
    assert row > 0  # or its own seed could not be told from that of the run
    position = len(byte_tokenizer()(PROMPTS[row]).input_ids) + found["token"]
    noise = gumbel(torch.tensor([5 + row]), torch.tensor([[position]]), torch.tensor([first, second]))[0, 0]
    assert not found["near_tie"]
    assert found["margin"] == pytest.approx(float(noise[0] - noise[1]), abs=1e-5)
    assert found["margin"] > 1e-4


@pytest.mark.parametrize(
    ("change", "args", "facts", "says"),
    [
        (
            lambda text: [(text[0] + 1) % 200 + 3, *text[1:]],
            ("--temperature", "1", "--top-k", "1"),
            {"margin": None, "near_tie": False},
            "a sampling parameter rules one of the two out",
        ),
        (lambda text: text[:5], (), {"token": 5, "other": None, "other_text": "", "near_tie": False}, "(id none)"),
    ],
    ids=["ruled out", "ended"],
)
def test_a_token_that_cannot_stand_there_or_none_is_a_true_difference(compare, runs, change, args, facts, says):
    runs.patch = lambda way, run: replace(run, tokens=[change(run.tokens[0])]) if way == "prompt lookup" else run
    table, document = compare("--num-prompts", "1", *args, model="base", draft_model=None, code=1)
    [found] = document["by_way"]["prompt lookup"]["differences"]
    assert found.items() >= facts.items()
    assert says in table
    assert ("one text ends there" in table) == (says == "(id none)")


@pytest.mark.parametrize(
    ("dtype", "largest", "most"),
    [("bfloat16", 12.0, 8 / 16), ("bfloat16", -3.0, 8 / 64), ("float16", 12.0, 8 / 128), ("float32", 12.0, 1e-4)],
)
def test_a_near_tie_is_eight_steps_of_a_half_precision(dtype, largest, most):
    logits = torch.tensor([0.5, largest, -1.0, float("-inf")])
    assert tolerance(logits, getattr(torch, dtype)) == most


def test_a_run_that_is_cut_short_leaves_the_file_as_it_was(folder, prompts, monkeypatch, tmp_path):
    file = tmp_path / "found.jsonl"
    file.write_text("before")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_module, "run_trials", stop)
    args = ("--model", str(folder / "merged"), "--prompts", prompts, "--json", str(file))
    assert main(["compare", *args]) == 130
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_draft_model_with_another_tokenizer_is_measured_beside_assisted_generation(prompts, tmp_path):
    for name, tokenizer in (("base", byte_level(TEXTS, 300)), ("small", sentencepiece_like(TEXTS, 500))):
        tokenizer.save_pretrained(tmp_path / name)
        tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
    args = ["--model", str(tmp_path / "base"), "--draft-model", str(tmp_path / "small"), "--prompts", prompts]
    records, _ = measured("compare", *args, "--assisted", "--max-new-tokens", "9")
    ways = {record["mode"]: record for record in records}
    assert ways["draft model"]["drafted"] > 0
    assert ways["draft model"]["same"] == ways["HF assisted"]["same"] == len(PROMPTS)


@pytest.mark.parametrize(
    ("model", "args", "says"),
    [
        ("merged", "--max-input-len 2", "no prompt has 2 tokens or fewer"),
        ("merged", "--prompts {long}", "the prompt has 160 tokens; a prompt may have 159"),
        ("merged", "--repeats 0", "--repeats must be from 1"),
        ("merged", "--prompt-lookup", "--prompt-lookup"),
        ("merged", "--acceptance rejection", "--acceptance is for --draft-model"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(folder, prompts, capsys, tmp_path, model, args, says):
    (tmp_path / "long.txt").write_text("j" * (CONTEXT - 1))  # and the token that begins a text
    words = args.format(small=folder / "small", long=tmp_path / "long.txt").split()
    assert says in fails(capsys, "compare", "--model", str(folder / model), "--prompts", prompts, *words)
