"""Evaluation by the length of prompts: the same prompts, cut at their beginning, and a report of each length."""

import json

import pytest

from helpers.chats import CHAT, tiny_tokenizer, write
from redrafter import ReDrafter, boxed_pair
from redrafter.app.loading import Pair
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.cli import main
from redrafter.errors import ArgumentError
from redrafter.train.evaluate.command import evaluate
from redrafter.train.evaluate.options import EvaluateOptions, Search
from redrafter.train.evaluate.replay import ReplayStats, replay
from redrafter.train.evaluate.texts import PromptChoice, PromptSource, cut_prompt, write_texts
from redrafter.tree.sizes import TreeShape

TEXTS = ["abcdefghijklmnop", "0123456789", "short", "ABCDEFGHIJKL"]
WORDS = ["the moon is far away and the sun is farther " * 3, "it was a night without any stars at all " * 3]


def choose(path, rows: list[object], *lengths: int, count: int | None = None, **changes: object) -> PromptChoice:
    """Choose prompts of a file of rows, with a token for each byte."""
    return PromptSource([write(path / "rows.jsonl", rows)], tiny_tokenizer(), count, **changes).of_lengths(lengths)


def decoded(choice: PromptChoice) -> dict[int | None, list[str]]:
    """Return the prompts as texts, sorted, by their length."""
    return {length: sorted(map(tiny_tokenizer().decode, ids)) for length, ids in choice.by_length.items()}


# Prompts


@pytest.mark.parametrize(
    "ids, length, bos, cut",
    [
        ([5, 6, 7, 8], 2, 1, [7, 8]),
        ([5, 6, 7, 8], 4, 1, [5, 6, 7, 8]),
        ([1, 6, 7, 8], 2, 1, [1, 8]),
        ([1, 6, 7, 8], 4, 1, [1, 6, 7, 8]),
        ([5, 1, 7, 8], 2, 1, [7, 8]),
        ([1, 6, 7, 8], 2, None, [7, 8]),
    ],
)
def test_a_prompt_loses_its_beginning_but_not_its_bos(ids, length, bos, cut):
    assert cut_prompt(ids, length, bos) == cut


def test_each_length_has_the_beginnings_of_the_same_texts_ending_at_the_same_tokens(tmp_path):
    choice = choose(tmp_path, [{"text": text} for text in TEXTS], 4, 2, 11, 4)
    assert decoded(choice) == {
        2: ["JK", "jk"],
        4: ["HIJK", "hijk"],
        11: ["ABCDEFGHIJK", "abcdefghijk"],
    }
    assert list(choice.by_length) == [2, 4, 11]
    assert [ids[-4:] for ids in choice.by_length[11]] == choice.by_length[4]
    assert choice.categories == {"rows": 2}
    assert (choice.left_out, choice.longest) == ((), None)


@pytest.mark.parametrize(
    "changes, ends",
    [
        ({"most": 14}, ["23456789", "EFGHIJKL", "ghijklmn"]),
        ({"share": 0.5}, ["abcdefgh"]),
        ({"share": 0.8, "most": 9}, ["01234567", "BCDEFGHI", "bcdefghi"]),
    ],
)
def test_the_options_that_cut_a_text_say_where_it_ends(tmp_path, changes, ends):
    assert decoded(choose(tmp_path, [{"text": text} for text in TEXTS], 8, **changes))[8] == ends


def test_a_prompt_that_is_no_text_keeps_its_end(tmp_path):
    rows = [{"prompt": "abcdefghijkl", "completion": "m"}, CHAT | {"source": "chat"}]
    assert decoded(choose(tmp_path, rows, 5)) == {
        5: sorted(["hijkl", "<s>hi\n<|assistant|>\n"[:3] + "i\n<|assistant|>\n"])
    }


def test_lengths_that_no_prompt_has_are_left_out(tmp_path):
    choice = choose(tmp_path, [{"text": text} for text in TEXTS], 17, 4, 12, 20)
    assert decoded(choice) == {4: ["IJKL", "ijkl"], 12: ["ABCDEFGHIJKL", "abcdefghijkl"]}
    assert (choice.left_out, choice.longest) == ((17, 20), 16)


@pytest.mark.parametrize("lengths", [(9, 3), (9, 3, 900)])
def test_prompts_are_counted_by_category_among_those_that_are_long_enough(tmp_path, lengths):
    """With a length that no prompt has, every row is read before it is known which are long enough."""
    rows = [{"text": "a" * (20 if n % 5 == 0 else 1), "source": f"kind {n % 2}"} for n in range(30)]
    choice = choose(tmp_path, [*rows, {"text": "no", "source": "short"}], *lengths, count=2)
    assert choice.categories == {"kind 0": 2, "kind 1": 2}


def test_no_prompt_of_the_shortest_length_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match=r"--prompt-lengths 17: no prompt of .*rows.jsonl .* the longest has 16"):
        choose(tmp_path, [{"text": text} for text in TEXTS], 20, 17)


# The report


@pytest.fixture(scope="module")
def pair() -> Pair:
    engine = ReDrafter.from_pretrained(boxed_pair())
    return Pair("base", "drafter", "its drafter", load_tokenizer(boxed_pair()), engine)


def test_each_length_counts_what_a_replay_of_its_prompts_counts(pair, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": text} for text in WORDS])
    options = EvaluateOptions(
        prompts=(path,), prompt_lengths=(12, 3, 500), new_tokens=12, shapes=(Search(3, 4),), seed=5
    )
    document = evaluate(pair, options)
    assert document["prompts"]["lengths"] == [3, 12]
    assert document["prompts"]["lengths_left_out"] == [500]
    measured = [(result["temperature"], result["prompt_length"]) for result in document["temperatures"]]
    assert measured == [(0, 3), (0, 12), (1, 3), (1, 12)]
    choice = PromptSource([path], pair.tokenizer, seed=5).of_lengths((3, 12))
    for result in document["temperatures"]:
        prompts = choice.by_length[result["prompt_length"]]
        texts = write_texts(pair.engine.target, prompts, 12, result["temperature"], 5)
        assert {len(ids) for ids in prompts} == {result["prompt_length"]}
        shape = TreeShape(3, 4, 13)
        stats = ReplayStats.sum(shape, replay(pair.engine.drafter, pair.engine.target, texts, [shape])[0])
        tree = result["trees"][0]["all_steps"]
        assert (tree["steps"], tree["accepted_by_depth"]) == (stats.steps, stats.accepted_by_depth)


def test_the_table_has_a_line_for_each_length_and_one_for_those_without_prompts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", [{"text": text, "source": text[:2]} for text in WORDS])
    words = (
        "--prompts rows.jsonl --prompt-lengths 3,12,500 --new-tokens 12 --shapes 3x4,1x2 --node-budgets 9 --device cpu"
    )
    assert main(["evaluate", *words.split(), "--json", "out.json", "--plot", "out.png"]) == 0
    printed = capsys.readouterr()
    document, lines = json.loads((tmp_path / "out.json").read_text()), printed.out.splitlines()
    longest = document["prompts"]["longest"]
    assert f"not measured: prompts of 500 tokens, for the longest prompt has {longest}" in lines
    assert "temperature 1, prompts of 12 tokens: 2 of 2 texts" in printed.err
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    shown = [line for line in lines if line.startswith("  prompts of ")]
    expected = []
    for pair in zip(document["temperatures"][::2], document["temperatures"][1::2], strict=True):
        expected += [(result, f"{result['all_texts']['tokens']:8d}") for result in pair]
        for number in range(3):
            steps = [result["trees"][number]["all_steps"] for result in pair]
            expected += [(result, f"{row['tokens_per_step']:.3f}") for result, row in zip(pair, steps, strict=True)]
    assert len(shown) == len(expected) == 2 * 2 * (1 + 3)  # temperatures, lengths; the texts and three trees
    for line, (result, number) in zip(shown, expected, strict=True):
        assert line.startswith(f"  prompts of {result['prompt_length']} tokens ")
        assert number in line
