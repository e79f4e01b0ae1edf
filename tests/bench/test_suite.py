"""`redrafter bench --suite` on the boxed pair and on servers, and `redrafter evaluate --suite` beside it."""

import csv
import json
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from helpers.chats import write
from helpers.command_line import fails, measured, ran
from redrafter import ReDrafter, boxed_pair
from redrafter.app.flags import flag
from redrafter.bench import suite as suite_module
from redrafter.checkpoints.tokenizers import end_tokens, load_tokenizer
from redrafter.scheduler.sequence import Stats

SHAPE = {"num_beams": 5, "draft_len_per_beam": 5, "node_budget": 12}
TREE = [word for name, value in SHAPE.items() for word in (flag(name), str(value))]
bench = partial(measured, "bench")
QUESTIONS = [
    {"category": "writing", "turns": ["Write of the sea.", "Again, shorter."]},
    {"category": "qa", "turns": ["Who was the old man?"]},
    {"category": "writing", "turns": ["Write of an old man who looked at the sea for a long time."]},
    {"category": "rag", "turns": ["long " * 2000, "And?"]},
]


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> str:
    """A suite of three categories, of which the last is too long for the boxed pair."""
    folder = tmp_path_factory.mktemp("suite")
    write(folder / "question.jsonl", QUESTIONS)
    return str(folder)


@contextmanager
def every_step_drafted():
    """Let all steps draft the tree that is asked for, though drafts may not pay for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReDrafter, "pauses", False)
        yield


@pytest.fixture(scope="module", params=["0", "1"])
def both(request, suite, tmp_path_factory) -> tuple[dict, dict, Path, str]:
    """The documents of `bench` and `evaluate` on the suite, the folder of their files and what `bench` printed."""
    folder = tmp_path_factory.mktemp("out")
    files = [word for name in ("csv", "markdown") for word in (f"--{name}", str(folder / f"bench.{name}"))]
    writing = ("--device", "cpu", "--suite", suite, "--seed", "3")
    words = ("--max-new-tokens", "24", "--repeats", "2", "--batch-sizes", "1,2", "--temperature", request.param)
    with every_step_drafted():
        document, printed = bench(*writing, *words, "--no-draft-from-text", *TREE, *files)
    files = [word for name in ("csv", "markdown", "json") for word in (f"--{name}", str(folder / f"evaluate.{name}"))]
    words = ("--new-tokens", "24", "--temperatures", request.param, "--shapes", "5x5", "--node-budgets", "12", *files)
    code, _, err = ran("evaluate", *writing, *words)
    assert code == 0, err
    return document, json.loads((folder / "evaluate.json").read_text()), folder, printed


def test_both_ways_answer_all_turns_alike_and_are_timed(both):
    document, _, _, printed = both
    assert (document["complete"], document["errors"]) == (True, [])
    rows = {(row["batch_size"], row["category"]): row for row in document["suite"]}
    assert list(rows) == [(size, name) for size in (1, 2) for name in ("writing", "qa", "rag")]
    for (_, category), row in rows.items():
        turns, skipped = {"writing": (3, 0), "qa": (1, 0), "rag": (0, 2)}[category]
        assert (row["turns"], row["skipped"]) == (turns, skipped)
        if turns:
            assert row["differing_texts"] == 0
            assert turns <= row["tokens"] <= 24 * turns
            assert row["speedup"] > 0
            assert 1 <= row["accepted_length"] <= 6
    assert all(entry["equal"] for of in document["equality"] for entry in of["turns"])
    assert "4 questions in 3 categories, 6 turns" in printed
    assert "batch size 2, temperature" in printed


def test_accepted_lengths_and_rates_are_those_of_generate(both, suite):
    """Ask the questions by hand, with the answers in the prompts, under the seeds that the turns have."""
    document, *_ = both
    engine = ReDrafter.from_pretrained(boxed_pair(), **SHAPE, draft_from_text=False)
    tokenizer = load_tokenizer(boxed_pair())
    sampling = {"do_sample": True, "temperature": document["temperature"], "top_k": 0}
    arguments = {"max_new_tokens": 24, "eos_token_id": end_tokens(engine.model, tokenizer)}
    arguments |= sampling if document["temperature"] else {"do_sample": False}
    found: dict[str, list[Stats]] = {"writing": [], "qa": []}

    def ask(category: str, messages: list[dict[str, str]], seed: int) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        out = engine.generate(ids, torch.ones_like(ids), seed=seed, return_dict_in_generate=True, **arguments)
        found[category] += out.stats.rows
        return tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)

    def user(content: str) -> dict[str, str]:
        return {"role": "user", "content": content}

    with every_step_drafted():
        first = QUESTIONS[0]["turns"]
        answer = ask("writing", [user(first[0])], 3)
        ask("writing", [user(QUESTIONS[2]["turns"][0])], 4)
        ask("writing", [user(first[0]), {"role": "assistant", "content": answer}, user(first[1])], 5)
        ask("qa", [user(QUESTIONS[1]["turns"][0])], 6)
    for row in document["suite"][:2]:
        stats = found[row["category"]]
        steps, accepted = (sum(getattr(one, name) for one in stats) for name in ("steps", "accepted"))
        assert (row["steps"], row["accepted"]) == (steps, accepted)
        assert row["accepted_length"] == 1 + accepted / steps
        of_turns = sum(1 + one.accepted / one.steps for one in stats) / len(stats)
        assert row["accepted_length_of_turns"] == pytest.approx(of_turns)
        reached = [steps, *map(sum, zip(*(one.accepted_by_depth for one in stats), strict=True))]
        rates = [after / before if before else None for before, after in pairwise(reached)]
        assert row["acceptance"] == rates
    assert accepted > 0


def test_evaluate_replays_the_same_answers(both):
    measured_, evaluated, *_ = both
    [result] = evaluated["temperatures"]
    rows = {row["category"]: row for row in measured_["suite"][:3]}
    assert result["skipped"] == {name: row["skipped"] for name, row in rows.items()}
    tree = next(tree for tree in result["trees"] if tree["nodes"] == 12)
    for name, row in rows.items():
        assert result["texts"][name]["tokens"] == row["tokens"]
        for key in ("turns", "steps", "accepted", "accepted_length", "accepted_length_of_turns"):
            assert tree["categories"][name][key] == row[key], (name, key)


def test_tables_are_written_as_csv_and_markdown(both):
    document, evaluated, folder, _ = both
    with (folder / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ["writing", "qa", "rag", "mean of categories", "all turns"]
    assert [(row["batch_size"], row["category"]) for row in rows] == [(size, name) for size in "12" for name in names]
    assert float(rows[0]["accepted_length"]) == document["suite"][0]["accepted_length"]
    assert float(rows[0]["position_1"]) == document["suite"][0]["acceptance"][0]
    assert rows[2]["accepted_length"] == ""
    assert sum(int(row["turns"]) for row in rows[:3]) == int(rows[4]["turns"]) == 4
    mean = (float(rows[0]["accepted_length"]) + float(rows[1]["accepted_length"])) / 2
    assert float(rows[3]["accepted_length"]) == pytest.approx(mean)
    text = (folder / "bench.markdown").read_text()
    assert text.count("| category | turns | skipped | tokens | plain tok/s | tok/s | x plain | differ |") == 2
    assert f"| qa | 1 | 0 | {rows[1]['tokens']} |" in text
    assert ": 4 questions in 3 categories, 6 turns" in text
    with (folder / "evaluate.csv").open() as file:
        rows = list(csv.DictReader(file))
    trees = [tree["tree"] for tree in evaluated["temperatures"][0]["trees"]]
    assert [(row["tree"], row["category"]) for row in rows] == [(tree, name) for tree in trees for name in names]
    assert f"**temperature {document['temperature']:g}, tree {trees[0]}**" in (folder / "evaluate.markdown").read_text()


def test_a_difference_is_shown(suite, monkeypatch):
    """Let drafting lose a token on purpose."""
    run = suite_module.Workload.run_batch

    def losing(work, batch, speculate, *, seed=0):
        ran = run(work, batch, speculate, seed=seed)
        if speculate:
            ran.tokens[0][2] += 1
        return ran

    monkeypatch.setattr(suite_module.Workload, "run_batch", losing)
    words = ("--device", "cpu", "--suite", suite, "--max-new-tokens", "6", "--repeats", "1", "--num-prompts", "1")
    document, printed = bench(*words)
    assert [row.get("differing_texts") for row in document["suite"]][1] == 1
    assert "qa: OTHER TOKENS, which rounding does not explain, at new token 2 of prompt 0" in printed


@pytest.mark.parametrize("command", ["bench --device cpu", "evaluate --device cpu"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--suite {suite} --prompts {suite}/question.jsonl", "--prompts has no meaning with --suite: leave it out"),
        ("--suite {suite} --prompt-tokens 9", "--prompt-tokens has no meaning with --suite"),
        ("--suite {folder}", "holds no .jsonl"),
        ("--suite {folder}/gone", "gone is not a directory"),
        ("--csv out.csv", "--csv is for --suite: give that too"),
        ("--suite {suite} --csv {folder}/no/out.csv", "cannot write"),
        ("--suite=", "--suite needs a name, got an empty one"),
    ],
)
def test_what_a_suite_cannot_be_asked_with_is_refused_in_one_line(capsys, tmp_path, suite, command, words, message):
    words = words.format(suite=suite, folder=tmp_path)
    assert message in fails(capsys, *command.split(), *words.split(" "))


@pytest.mark.parametrize("words", ["--context 9", "--against eager", "--waves 2", "--draft-vocab-sizes 9", "--plots p"])
def test_what_bench_measures_beside_is_no_part_of_a_suite(capsys, suite, words):
    assert "has no meaning with --suite" in fails(capsys, "bench", "--suite", suite, *words.split())


@pytest.mark.parametrize("words", ["--explain", "--prompt-lengths 9", "--prompts p.txt"])
def test_what_evaluate_measures_beside_is_no_part_of_a_suite(capsys, suite, words):
    assert "has no meaning with --suite" in fails(capsys, "evaluate", "--suite", suite, *words.split())


@pytest.mark.parametrize("command", ["bench", "evaluate"])
def test_a_model_without_a_chat_template_needs_one(capsys, tmp_path, folder, suite, command):
    tokenizer = load_tokenizer(folder / "base")
    tokenizer.chat_template = None
    (tmp_path / "plain").symlink_to(folder / "merged")
    plain = tmp_path / "copy"
    plain.mkdir()
    for file in (folder / "merged").iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).symlink_to(file)
    words = (command, "--device", "cpu", "--suite", suite, "--model", str(plain))
    assert "has no chat template" in (err := fails(capsys, *words))
    assert "give one with --chat-template FILE" in err
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content[:9] }}{% endfor %}:")
    new = "--max-new-tokens" if command == "bench" else "--new-tokens"
    code, out, err = ran(*words, "--chat-template", str(tmp_path / "own.jinja"), new, "4", "--num-prompts", "1")
    assert code == 0, err
    assert "all turns" in out


@pytest.mark.parametrize("command", ["bench --max-new-tokens", "evaluate --new-tokens"])
def test_where_no_turn_fits_it_is_said(capsys, tmp_path, command):
    write(tmp_path / "question.jsonl", QUESTIONS[-1:])
    err = fails(capsys, *command.split(), "8", "--device", "cpu", "--suite", str(tmp_path))
    assert "no question leaves room" in err or "no turn has a prompt of at most" in err
