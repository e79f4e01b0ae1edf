"""Reading of prompts by every command that measures, and refusals of other files."""

import json

import pytest

from helpers.chats import CHAT, tiny_tokenizer, write
from helpers.command_line import byte_tokenizer, fails
from redrafter import ArgumentError, boxed_pair
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.cli import main
from redrafter.cli import measure as measure_module
from redrafter.measure.prompts import PromptSource, cut_prompt, encode, read_prompts


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.jsonl", '{"text": "a\\nb", "source": "x"}\n\n{"prompt": "c"}', ["a\nb", "c"]),
        (
            "p.jsonl",
            '\ufeff{"text": "one\u2028two\u0085three"}\n\n{"text": "four"}\r\n',
            ["one\u2028two\u0085three", "four"],
        ),
        ("p.txt", "one\u2028two\r\n\nthree\n", ["one\u2028two", "three"]),
        ("p.json", '[{"input": "a b", "instruction": "Sum up.", "output": "x"}]', ["a b Sum up."]),
        ("p.json", '\ufeff[{"input": "", "instruction": "Sag ja 🙂"},\n {"input": "c"}]', ["Sag ja 🙂", "c"]),
    ],
)
def test_only_a_line_feed_ends_a_row_and_instructions_come_after_their_input(tmp_path, name, content, prompts):
    (tmp_path / name).write_bytes(content.encode())
    assert [row.text or row.prompt for row in read_prompts(str(tmp_path / name))] == prompts


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.json", "[]", "holds no prompts"),
        ("p.json", "[" * 100_000, "not JSON"),
        ("p.json", '[{"input": "a"}, {"output": "b"}]', "p.json:row 2: a row has one of"),
        ("p.json", '[{"input": "", "instruction": ""}]', "p.json:row 1: the prompt is empty"),
        ("p.json", '[{"input": "a", "instruction": 7}]', 'p.json:row 1: "instruction" must be a string'),
        ("p.json", '[{"input": "a", "instruction": "\\ud83d"}]', "a lone surrogate"),
        ("p.jsonl", '{"text": "a"}\n{"text": 7}', "p.jsonl:2: "),
        ("p.jsonl", "\n{\n", "p.jsonl:2: not JSON"),
        ("p.jsonl", '{"prompt": "a", "completion": "b", "response": "c"}', "both completion and response"),
        ("p.jsonl", '{"text": "a", "split": "train"}', "holds no prompts: rows of the split train are left out"),
        ("p.jsonl", "", "holds no prompts"),
        ("p.txt", " \n\n", "holds no prompts"),
        ("p.txt", b"\xff", "p.txt cannot be read"),
        ("nowhere.json", None, "cannot be read"),
        ("nowhere.txt", None, "cannot read prompts"),
    ],
)
def test_prompts_that_are_none_are_refused_in_one_line(capsys, tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in ("bench", "compare"):
        err = fails(capsys, command, "--prompts", str(tmp_path / name))
        assert says in err
        assert str(tmp_path / name) in err


ASKED = {"role": "user", "content": "Sag ja"}
ROWS = [
    ({"text": "to be or not"}, "to be or not"),
    ({"prompt": "one", "completion": " two"}, "one"),
    ({"prompt": "<bos>one"}, "one"),  # which brings its own beginning
    ({"instruction": "Sum up.", "input": "a b", "output": "x"}, "a b Sum up."),
    ({"messages": [ASKED, {"role": "assistant", "content": "ja"}, ASKED]}, "u:Sag ja\na:"),
    ({"turns": ["Sag ja", "warum?"]}, "u:Sag ja\na:"),
    ("a string", "a string"),
]


@pytest.mark.parametrize(
    ("cut", "text"), [((), "to be or not"), (("--prompt-share", "0.5"), "to be"), (("--prompt-tokens", "3"), "to")]
)
def test_every_command_writes_on_from_the_same_prompts(monkeypatch, tmp_path, folder, cut, text):
    """The ids that each gives to what decodes; a part is taken of a text only."""
    tokenizer = byte_tokenizer()
    expected = [tokenizer(text if "text" in row else begun).input_ids for row, begun in ROWS]
    for index in (4, 5):  # rendered by the chat template, which writes no <bos>
        expected[index] = expected[index][1:]
    seen: list[list[int]] = []

    class StopError(ArgumentError):
        pass

    def stop(prompts: list[list[int]]) -> None:
        seen.extend(prompts)
        raise StopError("enough")

    monkeypatch.setattr(measure_module, "_batches", lambda prompts, *_: stop(prompts[""]))
    monkeypatch.setattr(measure_module, "_short_enough", lambda prompts, *_: stop(prompts[""]))
    monkeypatch.setattr(measure_module, "write_texts", lambda target, prompts, *_, **__: stop(prompts))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row, _ in ROWS))
    names = ["--model", str(folder / "merged"), "--prompts", str(tmp_path / "rows.jsonl"), *cut]
    for command in ("bench", "compare", "evaluate"):
        seen.clear()
        assert main([command, *names]) == 2
        assert sorted(seen) == sorted(expected), command
        assert command == "evaluate" or seen == expected  # which shuffles each category


@pytest.mark.parametrize("command", ["bench", "compare", "evaluate"])
def test_parts_of_a_text_that_are_none_are_refused(capsys, command):
    for share in ("0", "1.5"):
        message = f"--prompt-share must be above 0 and at most 1, got {share}"
        assert message in fails(capsys, command, "--prompt-share", share)
    assert "--prompt-tokens must be from 1" in fails(capsys, command, "--prompt-tokens", "0")


def test_a_row_without_a_prompt_is_refused_by_name(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"text": "fine"}\n{"messages": [{"role": "assistant", "content": "hello"}]}')
    with pytest.raises(ArgumentError, match=r"p\.jsonl:2 has no tokens"):
        encode(read_prompts(str(tmp_path / "p.jsonl")), byte_tokenizer())
    with pytest.raises(ArgumentError, match=r"p\.jsonl:1 has no tokens"):
        encode(read_prompts(str(tmp_path / "p.jsonl")), byte_tokenizer(), share=0.1)


# Prompts of one length


TEXTS = ["abcdefghijklmnop", "0123456789", "short", "ABCDEFGHIJKL"]


def choose(path, rows: list[object], *lengths: int, count: int | None = None, **changes: object):
    """Choose prompts of a file of rows, with a token for each byte."""
    return PromptSource([write(path / "rows.jsonl", rows)], tiny_tokenizer(), count, **changes).of_lengths(lengths)


def decoded(choice: dict[int, dict[str, list[list[int]]]]) -> dict[int, list[str]]:
    """Return the prompts as texts, sorted, by their length."""
    decode = tiny_tokenizer().decode
    return {length: sorted(decode(ids) for some in found.values() for ids in some) for length, found in choice.items()}


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
    assert list(choice) == [2, 4, 11]
    assert [ids[-4:] for ids in choice[11]["rows"]] == choice[4]["rows"]


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


def test_prompts_are_counted_by_category_among_those_that_are_long_enough(tmp_path):
    rows = [{"text": "a" * (20 if n % 5 == 0 else 1), "source": f"kind {n % 2}"} for n in range(30)]
    choice = choose(tmp_path, [*rows, {"text": "no", "source": "short"}], 9, 3, count=2)
    assert {name: len(found) for name, found in choice[3].items()} == {"kind 0": 2, "kind 1": 2}


def test_a_length_that_no_prompt_has_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match=r"--prompt-lengths 17: no prompt of .*rows.jsonl has as many tokens"):
        choose(tmp_path, [{"text": text} for text in TEXTS], 4, 17)


# Prompts by category


QUESTION, ANSWER = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}


def test_prompts_come_by_category_from_rows_of_every_kind(tmp_path):
    tokenizer = load_tokenizer(boxed_pair())
    rows = [
        {"text": "to be or not to be, that is the question", "source": "plays"},
        {"messages": [QUESTION, ANSWER, QUESTION], "category": "chat"},
        {"turns": ["why?", "and then?"], "category": "chat"},
        {"messages": [QUESTION], "split": "test"},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 1]},
        {"text": "left out", "split": "train", "source": "train"},
    ]
    lines = tmp_path / "lines.txt"
    lines.write_text("a line\n\nanother line\n" + "long " * 200 + "\n")
    both = [write(tmp_path / "rows.jsonl", rows), str(lines)]
    found = PromptSource(both, tokenizer).by_category(100)
    chat = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    assert {name: sorted(map(tokenizer.decode, some)) for name, some in found.items() if name != "plays"} == {
        "chat": [chat, chat],
        "rows": sorted([chat, tokenizer.decode([5, 6, 7])]),
        "lines": sorted(tokenizer.decode(tokenizer(line).input_ids) for line in ("a line", "another line")),
    }
    [play] = found["plays"]
    whole = tokenizer(rows[0]["text"]).input_ids
    assert play == whole
    for share, most, count in ((0.5, None, len(whole) // 2), (1.0, 3, 3), (0.5, 64, len(whole) // 2)):
        cut = PromptSource(both[:1], tokenizer, share=share, most=most).by_category(100)
        assert cut["plays"] == [whole[:count]]
        assert {name: some for name, some in cut.items() if name != "plays"} == {
            name: some for name, some in found.items() if name in ("chat", "rows")
        }
    few = PromptSource(both, tokenizer, 1).by_category(100)
    assert {name: len(some) for name, some in few.items()} == dict.fromkeys(("plays", "chat", "rows", "lines"), 1)
    shipped = PromptSource([], tokenizer).by_category(500)
    assert set(shipped) == {"classic_books", "peps", "eips"}
    assert sum(map(len, shipped.values())) == 16
    first, again, *others = (PromptSource([], tokenizer, 2, seed).by_category(500) for seed in (0, 0, 1, 2, 3))
    assert first == again
    assert any(one != first for one in others)
