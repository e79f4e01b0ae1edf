"""`redrafter compare` in process, on a tiny pair and a tiny draft model."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.command_line import TEXT, byte_tokenizer, fails
from helpers.models import tiny_model
from helpers.tokenizers import TEXTS, byte_level, sentencepiece_like
from redrafter import ReDrafter, ReDrafterError
from redrafter import step as step_module
from redrafter.app import engines
from redrafter.app.loading import Pair
from redrafter.cli import compare as compare_module
from redrafter.cli import main
from redrafter.measure.differences import first_difference, tolerance
from redrafter.measure.prompts import read_prompts
from redrafter.sampling.noise import gumbel
from redrafter.tree.accept import Path as Kept

PROMPTS = ["ja", "Zürich", TEXT * 2, "10 €", "für"]
NEW = 24  # new tokens; more than the first runs write
WAYS = ["plain", "drafter", "draft model", "prompt lookup"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return str(file)


@pytest.fixture
def compare(folder, prompts, capsys):
    """Return a function that runs `redrafter compare` and returns its exit code, text and JSON document."""

    def run(*args: str, model: str = "merged", draft_model: str | None = "small") -> tuple[int, str, dict]:
        names = ["--model", str(folder / model), "--prompts", prompts, "--max-new-tokens", str(NEW)]
        names += [] if draft_model is None else ["--draft-model", str(folder / draft_model)]
        code = main(["compare", *names, *args])
        out, _ = capsys.readouterr()
        *lines, last = out.splitlines()
        return code, "\n".join(lines), json.loads(last)

    return run


@pytest.fixture
def runs(monkeypatch):
    """Record method, seed and result of every run but the warm-up runs; `patch(method, run)` may replace the result."""
    kept, honest = [], Pair.run
    monkeypatch.setattr(compare_module, "WARM_UP_TOKENS", 1)

    def run(self, prompts, options, **arguments):
        found = honest(self, prompts, options, **arguments)
        if options.max_new_tokens > 1:
            found = kept.patch(self.method, found)
            kept.append((self.method, options.seed, found))
        return found

    class Runs(list):
        patch = staticmethod(lambda way, run: run)

        def texts(self, way: str) -> list[list[int]]:
            return [row for name, _, run in self if name == way for row in run.tokens]

    kept = Runs()
    monkeypatch.setattr(Pair, "run", run)
    return kept


def by_way(document: dict) -> dict[str, dict]:
    return {way["way"]: way for way in document["ways"]}


@pytest.mark.parametrize("size", [1, 3])
def test_every_way_is_a_line_of_the_table_and_an_entry_of_the_document(compare, folder, prompts, size):
    code, table, document = compare("--batch-size", str(size))
    ways = by_way(document)
    assert code == 0
    assert document["complete"]
    assert list(ways) == WAYS
    assert f"5 prompts of 3 to {len(byte_tokenizer()(TEXT * 2).input_ids)} tokens, 0 longer" in table
    lengths = {"shortest": 3, "longest": len(byte_tokenizer()(TEXT * 2).input_ids)}
    assert document["prompts"] == {"file": prompts, "count": 5, "left_out": 0} | lengths
    assert document["model"] == str(folder / "merged")
    assert document["options"]["batch_size"] == size
    for line, (name, way) in zip(table.splitlines()[-4:], ways.items(), strict=True):
        assert re.fullmatch(
            rf"{name} +[\d.]+ +[\d.]+ +[\d.]+ +({'-' if name == 'plain' else '[0-9]+%'}) +(-|5 of 5)", line
        )
        assert way["tokens"] == 5 * NEW
        assert way["seconds"] > 0
        assert way["tokens_per_second"] == pytest.approx(way["tokens"] / way["seconds"])
        assert way["speedup"] == pytest.approx(ways["plain"]["seconds"] / way["seconds"])
        assert (way["same"], way["first_difference"]) == (None if name == "plain" else 5, None)
        assert way["accepted"] <= way["drafted"]
        assert sum(way["accepted_by_depth"]) == way["accepted"]
        assert way["steps"] + way["accepted"] >= 5 * (NEW - 1)  # the last step may keep more than there is room for
    assert (ways["plain"]["steps"], ways["plain"]["drafted"]) == (5 * (NEW - 1), 0)
    assert 0 < ways["draft model"]["accepted"] < ways["draft model"]["drafted"]
    assert [way["name"] for way in ways.values()] == [
        None,
        str(folder / "merged" / "drafter"),
        str(folder / "small"),
        None,
    ]
    assert [way["shape"] for way in ways.values()] == [
        None,
        {"num_beams": 5, "draft_len_per_beam": 5, "nodes": 12},
        {"num_beams": 1, "draft_len": 4, "nodes": 5},
        {"ngram": 2, "draft_len": 4},
    ]


def test_a_way_that_there_is_nothing_for_is_left_out(compare, folder):
    assert list(by_way(compare("--num-prompts", "1", model="base")[2])) == ["plain", "draft model", "prompt lookup"]
    assert list(by_way(compare("--num-prompts", "1", model="base", draft_model=None)[2])) == ["plain", "prompt lookup"]
    named = compare("--num-prompts", "1", "--drafter", str(folder / "drafter"), model="base", draft_model=None)[2]
    assert by_way(named)["drafter"]["name"] == str(folder / "drafter")


def test_flags_shape_the_ways_that_they_are_for(compare):
    ways = by_way(compare("--num-prompts", "1", "--draft-len", "3", "--ngram", "4", "--draft-len-per-beam", "2")[2])
    assert ways["drafter"]["shape"]["draft_len_per_beam"] == 2
    assert ways["draft model"]["shape"] == {"num_beams": 1, "draft_len": 3, "nodes": 4}
    assert ways["prompt lookup"]["shape"] == {"ngram": 4, "draft_len": 3}


def test_the_shape_is_that_of_batches_as_large_as_they_were(compare, monkeypatch):
    honest = ReDrafter.proposer_for
    monkeypatch.setattr(ReDrafter, "proposer_for", lambda self, rows: honest(self, rows) if rows < 6 else self.plain)
    drafter = by_way(compare("--batch-size", "64")[2])["drafter"]  # five prompts
    assert drafter["drafted"] > 0
    assert drafter["shape"] == {"num_beams": 5, "draft_len_per_beam": 3, "nodes": 8}


def test_each_batch_is_decoded_with_every_way_before_the_next(compare, runs):
    code, _, _ = compare("--batch-size", "3", "--repeats", "2", "--num-prompts", "4")
    assert code == 0
    assert [(way, len(run.tokens)) for way, _, run in runs] == 2 * [(way, size) for size in (3, 1) for way in WAYS]


def test_the_median_counts_of_seconds_and_of_ratios(compare, runs):
    seconds = {"plain": iter([1.0, 2.0, 4.0]), "prompt lookup": iter([1.0, 1.0, 8.0])}
    runs.patch = lambda way, run: replace(run, seconds=next(seconds[way]))
    _, _, document = compare("--repeats", "3", "--num-prompts", "1", model="base", draft_model=None)
    plain, lookup = document["ways"]
    assert (plain["seconds"], plain["tokens_per_second"], plain["speedup"]) == (2.0, NEW / 2.0, 1.0)
    assert (lookup["seconds"], lookup["tokens_per_second"], lookup["speedup"]) == (1.0, NEW / 1.0, 1.0)


@pytest.mark.parametrize("seed", [("--seed", "7"), ()])
def test_a_sampled_text_is_the_same_whatever_the_batch_size(compare, runs, seed):
    texts = {}
    for size in (1, 3):
        runs.clear()
        code, _, document = compare("--temperature", "1", *seed, "--batch-size", str(size))
        assert code == 0
        assert {way["same"] for way in document["ways"][1:]} == {5}
        assert document["options"]["seed"] == (7 if seed else 0)
        texts[size] = [runs.texts(way) for way in WAYS]
    assert texts[1] == texts[3]
    assert all(text == texts[1][0] for text in texts[1])
    assert len(set(map(tuple, texts[1][0]))) == 5


def test_prompts_that_are_too_long_are_left_out_and_counted(compare, runs):
    most = len(byte_tokenizer()("Zürich").input_ids)
    code, table, document = compare("--max-input-len", str(most), "--num-prompts", "3")
    assert code == 0
    assert f"3 prompts of 3 to {most} tokens, 1 longer ones left out" in table
    assert document["prompts"]["count"] == 3
    assert document["prompts"]["left_out"] == 1
    assert len(runs.texts("plain")) == 3


def test_outputs_are_not_compared_where_that_was_not_asked(compare):
    code, table, document = compare("--disable-output-comparison", "--num-prompts", "2")
    assert code == 0
    assert {way["same"] for way in document["ways"]} == {None}
    assert " of " not in table.splitlines()[-1]


@pytest.mark.parametrize("in_one", [False, True])
def test_rejection_promises_a_distribution_and_no_tokens(compare, runs, monkeypatch, in_one):
    args = ("--acceptance", "rejection")
    if in_one:
        monkeypatch.setattr(engines, "parse_draft_target_config", lambda text: (4, "cpu", "cpu", True))
        args = ("--draft-target-model-config", "[4,[0],[0],True]")
    code, _, document = compare(*args, "--temperature", "1")
    assert code == 0
    assert [way["same"] for way in document["ways"]] == [None, 5, None, 5]
    assert runs.texts("draft model") != runs.texts("plain")
    code, _, document = compare(*args)
    assert code == 0
    assert [way["same"] for way in document["ways"]] == [None, 5, 5, 5]


@pytest.mark.parametrize("asked", [True, False])
def test_a_way_that_writes_other_tokens_fails_and_the_report_says_where(compare, runs, monkeypatch, asked):
    honest = step_module.accept

    def keep_everything(tree, drawn, max_depth):
        path = honest(tree, drawn, max_depth)
        if max_depth == 0:  # plain decoding
            return path
        nodes = path.nodes.new_tensor(range(max_depth + 1)).expand_as(path.nodes)
        return Kept(nodes, path.accepted * 0 + max_depth)

    monkeypatch.setattr(step_module, "accept", keep_everything)
    off = () if asked else ("--disable-output-comparison",)
    code, table, document = compare("--batch-size", "3", *off, model="base")
    plain = runs.texts("plain")
    for name in ("draft model", "prompt lookup"):
        way, texts = by_way(document)[name], runs.texts(name)
        found = [first_difference(mine, theirs) for mine, theirs in zip(plain, texts, strict=True)]
        row = next(row for row, at in enumerate(found) if at is not None)
        assert way["same"] == (found.count(None) if asked else None)
        assert way["first_difference"] == ([row, found[row]] if asked else None)
        line = f"  OTHER TOKENS in prompt {row + 1} at new token {found[row] + 1}: the lower is "
        assert (line in table) == asked
        assert len(way["differences"]) == (len(found) - found.count(None) if asked else 0)
        assert table.count("OTHER TOKENS") <= 6
        assert (f"  and {len(found) - found.count(None) - 3} more" in table) == (
            asked and len(found) - found.count(None) > 3
        )
    assert code == int(asked)
    assert document["complete"]
    assert document["errors"] == []


def test_a_difference_is_counted_by_prompt_across_batches(compare, runs):
    def patch(way, run):
        if way != "prompt lookup" or len(run.tokens) != 2:  # the second batch
            return run
        first, second = run.tokens
        return replace(run, tokens=[first, [*second[:3], second[3] + 1, *second[4:]]])

    runs.patch = patch
    code, table, document = compare("--batch-size", "3")
    assert code == 1
    assert [way["same"] for way in document["ways"]] == [None, 5, 5, 4]
    assert document["ways"][-1]["first_difference"] == [4, 3]
    *_, row, where, plain, other = table.splitlines()
    assert row.split()[-3:] == ["4", "of", "5"]
    assert where.startswith("  OTHER TOKENS in prompt 5 at new token 4: the lower is ")
    [found] = document["ways"][-1]["differences"]
    text = runs.texts("plain")[4]
    assert (found["prompt"], found["token"], found["plain"], found["other"]) == (4, 3, text[3], text[3] + 1)
    decode = byte_tokenizer().decode
    assert found["common"] == decode(text[:3])
    assert found["common"] + found["plain_text"] == decode(text)
    assert not found["near_tie"]
    assert found["margin"] > found["tolerance"] == 1e-4
    for line, name, which in ((plain, "plain", "plain"), (other, "prompt lookup", "other")):
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


def swapped(first: int, second: int):
    """Return a patch that replaces the first occurrence of one id by another, in the outputs of prompt lookup."""

    def patch(way, run):
        for row, text in enumerate(run.tokens):
            if way == "prompt lookup" and first in text:
                changed = [*text]
                changed[text.index(first)] = second
                return replace(run, tokens=[*run.tokens[:row], changed, *run.tokens[row + 1 :]])
        return run

    return patch


def test_a_near_tie_is_counted_apart_and_does_not_fail(compare, runs, tied):
    model, first, second = tied
    runs.patch = swapped(first, second)
    code, table, document = compare("--model", model, "--batch-size", "5", draft_model=None)
    lookup = by_way(document)["prompt lookup"]
    assert code == 0
    assert (lookup["same"], lookup["near_ties"], lookup["first_difference"]) == (4, 1, None)
    [found] = lookup["differences"]
    assert found["near_tie"]
    assert found["margin"] == 0
    assert {found["plain"], found["other"]} == {first, second}
    assert "4 of 5, 1 near-ties" in table
    assert "  near-tie in prompt" in table
    assert "OTHER TOKENS" not in table


def test_the_noise_of_a_sampled_text_is_part_of_its_margin(compare, runs, tied):
    """Two equal logits are no tie under noise that is not."""
    model, first, second = tied
    runs.patch = swapped(first, second)
    code, _, document = compare(
        "--model", model, "--batch-size", "5", "--temperature", "1", "--seed", "3", draft_model=None
    )
    [found] = by_way(document)["prompt lookup"]["differences"]
    row, place = found["prompt"], found["token"]
    position = len(byte_tokenizer()(PROMPTS[row]).input_ids) + place
    noise = gumbel(torch.tensor([3 + row]), torch.tensor([[position]]), torch.tensor([first, second]))[0, 0]
    assert code == 1
    assert not found["near_tie"]
    assert found["margin"] == pytest.approx(float(noise[0] - noise[1]), abs=1e-5)
    assert found["margin"] > 1e-4


def test_a_token_that_a_sampling_parameter_rules_out_is_a_true_difference(compare, runs):
    def patch(way, run):
        text = run.tokens[0]
        return replace(run, tokens=[[(text[0] + 1) % 200 + 3, *text[1:]]]) if way == "prompt lookup" else run

    runs.patch = patch
    args = ("--num-prompts", "1", "--temperature", "1", "--top-k", "1")
    code, table, document = compare(*args, model="base", draft_model=None)
    [found] = by_way(document)["prompt lookup"]["differences"]
    assert code == 1
    assert found["margin"] is None
    assert not found["near_tie"]
    assert "a sampling parameter rules one of the two out" in table


def test_a_text_that_ends_early_is_a_true_difference(compare, runs):
    runs.patch = lambda way, run: replace(run, tokens=[run.tokens[0][:5]]) if way == "prompt lookup" else run
    code, table, document = compare("--num-prompts", "1", model="base", draft_model=None)
    [found] = by_way(document)["prompt lookup"]["differences"]
    assert code == 1
    assert (found["token"], found["other"], found["other_text"]) == (5, None, "")
    assert "one text ends there" in table
    assert "(id none)" in table


@pytest.mark.parametrize(
    ("dtype", "largest", "most"),
    [("bfloat16", 12.0, 4 / 16), ("bfloat16", -3.0, 4 / 64), ("float16", 12.0, 4 / 128), ("float32", 12.0, 1e-4)],
)
def test_a_near_tie_is_four_steps_of_a_half_precision(dtype, largest, most):
    logits = torch.tensor([0.5, largest, -1.0, float("-inf")])
    assert tolerance(logits, getattr(torch, dtype)) == most


def test_the_document_holds_every_text(compare, runs):
    _, _, document = compare("--batch-size", "3", model="base", draft_model=None)
    decode = byte_tokenizer().decode
    prompts = [decode(byte_tokenizer()(prompt).input_ids) for prompt in PROMPTS]
    assert [each["prompt"] for each in document["texts"]] == prompts
    assert [each["plain"] for each in document["texts"]] == [decode(text) for text in runs.texts("plain")]


def test_the_file_holds_the_document_too(compare, tmp_path):
    _, _, document = compare("--num-prompts", "1", "--output", str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text()) == document
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]


def test_a_run_that_is_cut_short_leaves_the_file_as_it_was(folder, prompts, monkeypatch, tmp_path):
    file = tmp_path / "found.json"
    file.write_text("before")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_module, "run_in_turn", stop)
    args = ("--model", str(folder / "merged"), "--prompts", prompts, "--output", str(file))
    assert main(["compare", *args]) == 130
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("name", "says"), [("/nowhere/found.json", "/nowhere/found.json"), ("{folder}", "directory"), ("", "--output")]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_decoded(
    folder, prompts, capsys, monkeypatch, tmp_path, name, says
):
    monkeypatch.setattr(Pair, "run", None)
    args = ("--model", str(folder / "merged"), "--prompts", prompts, "--output", name.format(folder=tmp_path))
    err = fails(capsys, "compare", *args)
    assert says in err
    assert "--output" in err


def test_instructions_come_after_their_input(tmp_path):
    rows = [
        {"input": "a b", "instruction": "Sum up.", "output": "x"},
        {"input": "", "instruction": "Sag ja 🙂"},
        {"input": "c"},
    ]
    (tmp_path / "p.json").write_text("\ufeff" + json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    found = read_prompts(str(tmp_path / "p.json"))
    assert [row.prompt for row in found] == ["a b Sum up.", "Sag ja 🙂", "c"]
    assert [row.answer for row in found] == ["\nx", None, None]


@pytest.mark.parametrize("name", ["prompts.json", "prompts.jsonl"])
def test_prompts_of_other_forms_are_the_same_prompts(compare, runs, tmp_path, name):
    rows = [
        json.dumps({"instruction": text, "input": ""} if name.endswith("n") else {"text": text}) for text in PROMPTS
    ]
    (tmp_path / name).write_text(f"[{','.join(rows)}]" if name.endswith("n") else "\n".join(rows))
    compare("--batch-size", "5", model="base", draft_model=None)
    code, _, document = compare("--prompts", str(tmp_path / name), "--batch-size", "5", model="base", draft_model=None)
    assert code == 0
    assert document["prompts"]["count"] == 5
    assert runs.texts("plain")[5:] == runs.texts("plain")[:5]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.json", "[]", "holds no prompts"),
        ("p.json", "", "holds no prompts"),
        ("p.json", "[" * 100_000, "not JSON"),
        ("p.json", '[{"input": "a"}, {"output": "b"}]', "p.json:row 2: a row has one of"),
        ("p.json", '[{"input": "", "instruction": ""}]', "p.json:row 1: the prompt is empty"),
        ("p.json", '[["a"]]', "p.json:row 1: a row has one of"),
        ("p.json", '[{"input": "a", "instruction": 7}]', 'p.json:row 1: "instruction" must be a string'),
        ("p.json", '[{"input": "a", "instruction": "\\ud83d"}]', "half a surrogate pair"),
        ("p.jsonl", '{"text": "a"}\n{"text": 7}', "p.jsonl:2: "),
        ("p.jsonl", '{"text": "\\ude42"}', "half a surrogate pair"),
        ("p.jsonl", '["a"]', "p.jsonl:1: "),
        ("p.jsonl", '{"prompt": "a", "completion": "b", "response": "c"}', "both completion and response"),
        ("p.jsonl", "", "holds no prompts"),
        ("p.txt", " \n\n", "holds no prompts"),
        ("p.txt", b"\xff", "cannot read prompts"),
        ("nowhere.json", None, "cannot be read"),
        ("nowhere.txt", None, "cannot read prompts"),
    ],
)
def test_prompts_that_are_none_are_refused_in_one_line(folder, capsys, tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    err = fails(capsys, "compare", "--model", str(folder / "merged"), "--prompts", str(tmp_path / name))
    assert says in err
    assert str(tmp_path / name) in err
    with pytest.raises(ReDrafterError, match=re.escape(says)):
        read_prompts(str(tmp_path / name))


def test_a_draft_model_with_another_tokenizer_is_measured_beside_assisted_generation(prompts, capsys, tmp_path):
    for name, tokenizer in (("base", byte_level(TEXTS, 300)), ("small", sentencepiece_like(TEXTS, 500))):
        tokenizer.save_pretrained(tmp_path / name)
        tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / name)
    args = ["--model", str(tmp_path / "base"), "--draft-model", str(tmp_path / "small"), "--prompts", prompts]
    assert main(["compare", *args, "--assisted", "--max-new-tokens", "9"]) == 0
    ways = by_way(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert ways["draft model"]["drafted"] > 0
    assert ways["draft model"]["same"] == ways["HF assisted"]["same"] == len(PROMPTS)


@pytest.mark.parametrize(
    ("model", "args", "says"),
    [
        ("merged", ["--max-input-len", "2"], "no prompt has 2 tokens or fewer"),
        ("merged", ["--batch-size", "0"], "--batch-size must be from 1"),
        ("merged", ["--repeats", "0"], "--repeats must be from 1"),
        ("merged", ["--num-prompts", "0"], "--num-prompts must be from 1"),
        ("merged", ["--num-prompts", "two"], "'two'"),
        ("merged", ["--prompt-lookup"], "--prompt-lookup"),
        ("merged", ["--no-speculate"], "--no-speculate"),
        ("merged", ["--acceptance", "rejection"], "--acceptance is for --draft-model"),
        ("merged", ["--adaptive"], "--adaptive is for --draft-model"),
        ("merged", ["--draft-model", ""], "an empty one"),
        ("merged", ["--draft-model", "./nowhere"], "./nowhere is not a directory"),
        ("merged", ["--draft-model", "{foreign}"], "use one of the same family, with the same tokenizer"),
        ("merged", ["--draft-target-model-config", "[4,[0],[0],False]"], "is for --draft-model"),
        ("base", ["--num-beams", "2"], "--num-beams is for a drafter or --draft-model"),
        ("base", ["--draft-model", "{small}", "--tuning", "shapes.json"], "--tuning is for a drafter"),
        ("base", ["--draft-model", "{small}", "--draft-target-model-config", "4"], "must look like"),
        ("base", ["--temperature", "-1"], "--temperature"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(folder, prompts, capsys, model, args, says):
    names = {name: str(folder / name) for name in ("small", "foreign")}
    args = [arg.format(**names) for arg in args]
    assert says in fails(capsys, "compare", "--model", str(folder / model), "--prompts", prompts, *args)


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        main(["compare", "--help"])
    assert end.value.code == 0
    shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert shown >= {"--prompts", "--num-prompts", "--max-input-len", "--batch-size", "--repeats", "--output"}
    assert shown >= {"--disable-output-comparison", "--model", "--drafter", "--draft-model", "--draft-len", "--ngram"}
    assert shown >= {"--acceptance", "--adaptive", "--draft-device", "--draft-target-model-config", "--temperature"}
    assert not shown & {"--prompt-lookup", "--no-speculate"}
