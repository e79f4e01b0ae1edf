"""`redrafter bench --suite` and `redrafter evaluate --suite` on the boxed pair."""

import csv
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.chats import write
from helpers.command_line import fails, measured, ran
from helpers.generation import noted
from redrafter import ReDrafter
from redrafter.app.flags import flag
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.engine.engine import Engine

SHAPE = {"num_beams": 5, "draft_len_per_beam": 5, "node_budget": 12}
TREE = [word for name, value in SHAPE.items() for word in (flag(name), str(value))]
QUESTIONS = [
    {"category": "writing", "turns": ["Write of the sea.", "Again, shorter."]},
    {"category": "qa", "turns": ["Who was the old man?"]},
    {"category": "writing", "turns": ["Write of an old man who looked at the sea for a long time."]},
    {"category": "rag", "turns": ["long " * 2000, "And?"]},
]
TURNS = {"writing": 3, "qa": 1, None: 4}


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


@pytest.fixture(scope="module")
def both(suite, tmp_path_factory) -> tuple[list[dict], list[dict], Path]:
    """The records of `bench` and `evaluate` on the suite, and the folder of their files."""
    folder = tmp_path_factory.mktemp("out")
    files = [word for name in ("csv", "markdown") for word in (f"--{name}", str(folder / f"bench.{name}"))]
    writing = ("--device", "cpu", "--suite", suite, "--seed", "3")
    words = ("--max-new-tokens", "12", "--repeats", "1", "--batch-sizes", "2", "--temperature", "1")
    with every_step_drafted():
        timed, _ = measured("bench", *writing, *words, "--no-draft-from-text", *TREE, *files)
    words = ("--new-tokens", "12", "--temperatures", "1", "--shapes", "5x5", "--node-budgets", "12")
    return timed, measured("evaluate", *writing, *words)[0], folder


def test_both_modes_answer_all_turns_alike_and_are_timed(both):
    timed, _, folder = both
    found = [(one["mode"], one.get("category")) for one in timed]
    assert found == [(mode, name) for mode in ("undrafted", "drafter") for name in TURNS]
    for one in timed:
        turns = TURNS[one.get("category")]
        assert (one["texts"], one["skipped"]) == (turns, 2 if one.get("category") is None else 0)
        assert turns <= one["tokens"] <= 12 * turns
        assert one["speedup"] > 0
        assert one.get("same", turns) == turns
    with (folder / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accepted_length"] or 1) for row in rows] == [one.get("accepted_length", 1.0) for one in timed]
    assert "| drafter | qa |" in (folder / "bench.markdown").read_text()


def test_one_engine_answers_all_turns_at_a_temperature(suite, monkeypatch):
    made = noted(monkeypatch, Engine, "__init__", lambda _, engine, *parts: type(engine))
    words = ("--device", "cpu", "--suite", suite, "--new-tokens", "2", "--temperatures", "0,1", "--shapes", "2x2")
    measured("evaluate", *words)
    assert made == [ReDrafter, Engine, Engine]


def test_evaluate_replays_the_same_answers(both):
    timed, evaluated, _ = both
    tree = {one.get("category"): one for one in evaluated if one["mode"] == "5x5, 12 nodes"}
    for one in timed[3:]:
        other = tree[one.get("category")]
        for name in ("texts", "tokens", "skipped", "steps", "accepted", "accepted_length", "accepted_length_of_texts"):
            assert one[name] == other[name], (one.get("category"), name)
        assert one["accepted"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--suite {suite} --prompts {suite}/question.jsonl", "--prompts has no meaning with --suite: leave it out"),
        ("--suite {suite} --prompt-tokens 9", "--prompt-tokens has no meaning with --suite"),
        ("--suite {folder}", "holds no .jsonl"),
        ("--suite {folder}/gone", "gone is not a directory"),
        ("--suite {suite} --csv {folder}/no/out.csv", "cannot write"),
        ("--suite=", "--suite needs a value, got an empty one"),
    ],
)
def test_what_a_suite_cannot_be_asked_with_is_refused_in_one_line(capsys, tmp_path, suite, words, message):
    words = words.format(suite=suite, folder=tmp_path)
    for command in ("bench", "evaluate", "compare"):
        assert message in fails(capsys, command, "--device", "cpu", *words.split(" "))


@pytest.mark.parametrize("words", ["--explain", "--prompt-lengths 9"])
def test_what_selects_other_prompts_is_no_part_of_a_suite(capsys, suite, words):
    assert "has no meaning with --suite" in fails(capsys, "evaluate", "--suite", suite, *words.split())


def test_a_model_without_a_chat_template_needs_one(capsys, tmp_path, folder, suite):
    tokenizer = load_tokenizer(folder / "base")
    tokenizer.chat_template = None
    plain = tmp_path / "copy"
    plain.mkdir()
    for file in (folder / "merged").iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).symlink_to(file)
    words = ("bench", "--device", "cpu", "--suite", suite, "--model", str(plain))
    assert "has no chat template" in (err := fails(capsys, *words))
    assert "give one with --chat-template FILE" in err
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content[:9] }}{% endfor %}:")
    code, out, err = ran(
        *words, "--chat-template", str(tmp_path / "own.jinja"), "--max-new-tokens", "4", "--num-prompts", "1"
    )
    assert code == 0, err
    assert "writing" in out


def test_where_no_turn_fits_it_is_said(tmp_path):
    write(tmp_path / "question.jsonl", QUESTIONS[-1:])
    code, _, err = ran("bench", "--max-new-tokens", "8", "--device", "cpu", "--suite", str(tmp_path))
    assert code == 2
    assert "no turn has a prompt of at most" in err
