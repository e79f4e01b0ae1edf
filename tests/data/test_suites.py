"""Suites of questions: the forms that their makers prepare, what is refused of them, and how they are asked."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.chats import tiny_tokenizer, write
from redrafter import ArgumentError, CheckpointError
from redrafter.data.suites import Dialogues, read_suite

SPEC = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["a", "b"]},
    {"question_id": 200, "category": "translation", "turns": ["Translate."]},
    {"question_id": 82, "category": "writing", "turns": ["Write more."]},
]
AIPERF = {"question_id": "0" * 32, "category": "coding", "source": "someone's", "messages": []}
AIPERF["messages"] = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(("system", "user", "user"))]
HUB = {"category": "math", "prompt": ["1 + 1?", "And 1 more?"], "reference": [], "prompt_id": 7}


def asked(name: Path) -> dict[str, list[list[list[str]]]]:
    """Read a suite; return what each turn of each question says, by category."""
    return {
        category: [[[message["content"] for message in turn] for turn in question.turns] for question in questions]
        for category, questions in read_suite(str(name)).categories.items()
    }


def test_questions_of_each_form_are_read_by_category(tmp_path):
    write(tmp_path / "question.jsonl", SPEC)
    expected = {"writing": [[["Write."], ["Again."]], [["Write more."]]], "translation": [[["Translate."]]]}
    assert asked(tmp_path) == asked(tmp_path / "question.jsonl") == expected
    assert list(asked(tmp_path)) == ["writing", "translation"]
    speed, hub = tmp_path / "speed", tmp_path / "hub"
    for folder, row in ((speed, AIPERF), (hub, HUB)):
        folder.mkdir()
        write(folder / "qualitative.jsonl", [row])
    # A system message is said before the first turn; the category goes before the source.
    assert asked(speed) == {"coding": [[["system 0", "user 1"], ["user 2"]]]}
    assert asked(hub) == {"math": [[["1 + 1?"], ["And 1 more?"]]]}
    assert str(read_suite(str(tmp_path / "question.jsonl"))).startswith(
        "question.jsonl: 3 questions in 2 categories, 4 turns"
    )


def test_a_question_file_is_read_without_the_answers_beside_it(tmp_path):
    (tmp_path / "model_answer").mkdir()
    write(tmp_path / "question.jsonl", SPEC)
    for name in ("model_answer/some.jsonl", "other.jsonl"):
        write(tmp_path / name, [{"choices": []}])
    assert list(asked(tmp_path)) == ["writing", "translation"]


def test_splits_keep_apart_and_those_of_one_name_do_not(tmp_path):
    for name in ("throughput_1k", "throughput_2k", "spec_bench"):
        (tmp_path / name).mkdir()
    low = {"category": "low_entropy", "turns": ["a"]}
    write(tmp_path / "throughput_1k" / "test-0.jsonl", [low])
    write(tmp_path / "throughput_1k" / "test-1.jsonl", [low])
    write(tmp_path / "throughput_2k" / "test.jsonl", [low])
    write(tmp_path / "spec_bench" / "question.jsonl", SPEC)
    counts = {category: len(questions) for category, questions in read_suite(str(tmp_path)).categories.items()}
    assert counts == {
        "spec_bench/writing": 2,
        "spec_bench/translation": 1,
        "throughput_1k/low_entropy": 2,
        "throughput_2k/low_entropy": 1,
    }
    assert list(read_suite(str(tmp_path / "throughput_1k")).categories) == ["low_entropy"]


def test_parquet_files_are_read_as_the_preparing_script_writes_them(tmp_path, monkeypatch):
    """The package `datasets` is stood in for: it need not be installed."""

    def load(kind, *, data_files, split):
        assert (kind, split) == ("parquet", "train")
        return json.loads(Path(data_files).read_text())

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    (tmp_path / "qualitative").mkdir()
    row = {"question_id": "q", "category": "stem", "sub_category": None, "turns": ["a", "b"], "multiturn": True}
    file = tmp_path / "qualitative" / "test.parquet"
    file.write_text(json.dumps([row]))
    assert asked(tmp_path) == {"stem": [[["a"], ["b"]]]}
    file.write_text(json.dumps([row, row | {"category": None}]))
    with pytest.raises(CheckpointError, match=r"test\.parquet:row 2: a question has a \"category\""):
        read_suite(str(tmp_path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": ["a"]}, 'a question has a "category", by which a suite is reported; found None'),
        ({"turns": ["a"], "category": 7}, "found 7"),
        ({"category": "x", "turns": []}, "a question is turns of a user"),
        ({"category": "x", "turns": ["a", ""]}, "turn 2 is empty"),
        ({"category": "x", "text": "a"}, 'a question has "turns", or "messages" of a user; for other rows: --prompts'),
        ({"category": "x", "choices": []}, "a row has one of"),
        ({"category": "x", "messages": [{"role": "system", "content": "a"}]}, "found the roles system"),
        (
            {"category": "x", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "since the model answers each itself; found the roles user, assistant",
        ),
        (
            {
                "category": "x",
                "turns": ["a", "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"],
            },
            "turn 2 is a placeholder of SPEED-Bench: its prepare_data.py fetches the prompts",
        ),
        (["a"], "a row has one of"),
    ],
)
def test_a_row_that_is_no_question_is_refused_by_file_and_line(tmp_path, row, message):
    file = tmp_path / "qualitative.jsonl"
    write(file, [SPEC[0], row])
    with pytest.raises(CheckpointError) as refused:
        read_suite(str(tmp_path))
    assert str(refused.value).startswith(f"{file}:2: ")
    assert message in str(refused.value)


def test_where_there_is_no_suite_it_is_said_what_to_give(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("no question")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "question.jsonl").write_text("\n\n")
    for name, message in (
        ("empty", "holds no .jsonl"),
        ("other", "holds no .jsonl"),
        ("gone", "is not a directory: give the directory with the question.jsonl of Spec-Bench"),
        ("blank", "question.jsonl holds no question"),
    ):
        with pytest.raises(ArgumentError, match=message):
            read_suite(str(tmp_path / name))


def test_questions_of_each_category_are_chosen_by_the_seed_in_their_order(tmp_path):
    write(tmp_path / "question.jsonl", [{"category": f"c{n % 2}", "turns": [f"{n}"]} for n in range(40)])
    suite = read_suite(str(tmp_path))

    def chosen(count: int | None, seed: int) -> dict[str, list[int]]:
        return {
            category: [int(question.turns[0][0]["content"]) for question in some]
            for category, some in suite.choose(count, seed).categories.items()
        }

    assert chosen(None, 0) == chosen(99, 5) == {"c0": list(range(0, 40, 2)), "c1": list(range(1, 40, 2))}
    first, again, other = (chosen(4, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert all(some == sorted(some) and len(some) == 4 for some in first.values())


# Asking


def test_each_turn_is_asked_after_the_answers_to_those_before_it(tmp_path):
    tokenizer = tiny_tokenizer()
    write(tmp_path / "question.jsonl", [SPEC[0], AIPERF | {"category": "writing"}, SPEC[2]])
    [questions] = read_suite(str(tmp_path)).categories.values()
    dialogues = Dialogues(questions, tokenizer, 1000)
    begun = [tokenizer.decode(prompt) for prompt in dialogues.next_prompts()]
    assert begun == [
        "<s><|user|>\nWrite.\n<|assistant|>\n",
        "<s><|system|>\nsystem 0\n<|user|>\nuser 1\n<|assistant|>\n",
        "<s><|user|>\nWrite more.\n<|assistant|>\n",
    ]
    # An end token is no part of an answer: the template writes its own.
    dialogues.answer([tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("No.</s>", "Ü", "left")])
    followed = [tokenizer.decode(prompt) for prompt in dialogues.next_prompts()]
    assert followed == [
        "<s><|user|>\nWrite.\n<|assistant|>\nNo.</s>\n<|user|>\nAgain.\n<|assistant|>\n",
        f"{begun[1]}Ü</s>\n<|user|>\nuser 2\n<|assistant|>\n",
    ]
    dialogues.answer([[], []])
    assert dialogues.next_prompts() == []
    assert dialogues.skipped == 0


def test_turns_whose_prompts_are_too_long_are_counted_with_those_after_them(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [["long " * 50, "b", "c"], ["a", "b", "c"], ["a", "long " * 50]]
    write(tmp_path / "question.jsonl", [{"category": "x", "turns": turns} for turns in rows])
    [questions] = read_suite(str(tmp_path)).categories.values()
    dialogues = Dialogues(questions, tokenizer, 60)
    asked_turns = 0
    while prompts := dialogues.next_prompts():
        assert all(len(prompt) <= 60 for prompt in prompts)
        asked_turns += len(prompts)
        dialogues.answer([[10]] * len(prompts))
    assert (asked_turns, dialogues.skipped) == (4, 4)


def test_a_template_that_cannot_render_a_question_names_its_row(tmp_path):
    write(tmp_path / "question.jsonl", SPEC)
    questions = read_suite(str(tmp_path)).categories["translation"]
    with pytest.raises(CheckpointError, match=r"question\.jsonl:2: the chat template refuses: no"):
        Dialogues(questions, tiny_tokenizer("{{ raise_exception('no') }}"), 99).next_prompts()
