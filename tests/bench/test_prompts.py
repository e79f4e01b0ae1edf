"""Prompts that every command which measures reads, and how they are told from what is none."""

import json

import pytest

from helpers.command_line import byte_tokenizer, fails
from redrafter import ArgumentError
from redrafter.cli import compare as compare_module
from redrafter.cli import main
from redrafter.data.documents import encode_documents
from redrafter.data.rows import Row
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.run import Workload
from redrafter.train.evaluate import command as evaluate_module


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
        ("p.txt", b"\xff", "cannot read prompts"),
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


def test_sixteen_prompts_ship():
    assert len(read_prompts(None)) == 16


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

    monkeypatch.setattr(Workload, "from_options", lambda engine, tokenizer, prompts, *_: stop(prompts))
    monkeypatch.setattr(compare_module, "select_prompts", lambda prompts, *_: stop(prompts))
    monkeypatch.setattr(evaluate_module, "write_texts", lambda target, prompts, *_, **__: stop(prompts))
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


def test_a_prompt_that_begins_the_text_itself_gets_no_second_beginning():
    tokenizer = byte_tokenizer()
    rows = [Row("a", text="ja"), Row("b", text="<bos>ja"), Row("c", prompt="<bos>ja")]
    assert encode(rows, tokenizer) == [tokenizer("ja").input_ids] * 3
    learnt = [*encode_documents([*rows[:2], Row("d", prompt="<bos>j", answer="a!")], tokenizer)]
    assert [document.ids.count(tokenizer.bos_token_id) for document in learnt] == [1, 1, 1]
