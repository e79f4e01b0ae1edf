"""The base answers a data set: exactly its own tokens, whatever the batch, the drafter or the interruptions."""

import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import redrafter.cli
from helpers.apart import start
from helpers.chats import tiny_tokenizer
from helpers.command_line import fails
from helpers.generation import noted
from helpers.models import with_tree
from helpers.training import VOCAB, tiny_model
from redrafter import DrafterConfig, Engine, RecurrentDrafter
from redrafter.app.loading import Pair
from redrafter.checkpoints.merged import boxed_pair
from redrafter.data.documents import encode_documents
from redrafter.data.prompts import RowChat
from redrafter.data.rows import Row, fingerprint, read_rows
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.drafting.recycled import RecycledTokens
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.model.target import Target
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.train.regenerate import answer_writer
from redrafter.train.regenerate.answer_writer import (
    MAX_QUESTION_TOKENS,
    QUESTION_TEMPERATURE,
    AnswerWriter,
    Task,
    invented_rows,
)
from redrafter.train.regenerate.command import load, regenerate
from redrafter.train.regenerate.config import RegenerateConfig, parse

CONTEXT, EOS = 160, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content == 'BAD' %}{{ raise_exception('no') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content | trim }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NEW = 6  # tokens of an answer


def talk(*turns: str) -> Row:
    """Make a conversation of user and assistant in turn; a first turn with `system:` is the system's."""
    messages = [{"role": "system", "content": turns[0][7:]}] if turns[0].startswith("system:") else []
    speaks = turns[len(messages) :]
    messages += [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(speaks)]
    return Row(f"talk:{turns}", messages=messages)


ROWS = [
    Row("t:1", text="The old man looked at the sea and the sky over it, and said nothing.", source="novel"),
    talk("hi", "hello", "and you?", "fine", "bye", "bye"),
    Row("t:3", text="Hi."),
    talk("system:be kind", "who are you?", "a model"),
    Row("t:5", ids=[1, 40, 50, 60, 70, 80], loss_mask=[False, False, False, True, True, True]),
    Row("t:6", messages=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]),
    talk("a longer question than the others are, which is thus in another place of its batch", "yes"),
    talk("x", "y", "z", "y"),
]


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Make a base that often ends its turn, with its tokenizer."""
    model = tiny_model(max_position_embeddings=CONTEXT)
    model.lm_head.weight.data[EOS] *= 1.8
    return Pair("base", "", None, tiny_tokenizer(TEMPLATE), Engine(Target(model), UndraftedProposer()))


def drafter() -> RecurrentDrafter:
    torch.manual_seed(7)
    return RecurrentDrafter(DrafterConfig(vocab_size=VOCAB, hidden_size=32)).eval()


@pytest.fixture
def config(tmp_path) -> RegenerateConfig:
    return RegenerateConfig(
        output=str(tmp_path / "own.jsonl"), batch_size=3, max_new_tokens=NEW, temperatures=(0.0, 0.7, 1.3), seed=5
    )


def quiet(line: str) -> None:
    pass


def lines(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def written(pair, rows, config) -> list[dict]:
    """Return the rows that a run writes, in the order of the data."""
    regenerate(pair, rows, config, log=quiet)
    return sorted(lines(config.output), key=lambda row: row["row"])


def answers(row: dict) -> list[tuple[int, int]]:
    """Return where each answer of a row begins and ends."""
    marks = [0, *row["loss_mask"], 0]
    begins = [place for place in range(len(marks) - 1) if marks[place : place + 2] == [0, 1]]
    ends = [place for place in range(len(marks) - 1) if marks[place : place + 2] == [1, 0]]
    return list(zip(begins, ends, strict=True))


# What is written


def test_every_answer_is_what_generate_gives_alone_behind_what_stands_before_it(pair, config):
    found = written(pair, ROWS, config)
    assert [row["prompt"] for row in found] == [row.where for row in ROWS]
    assert {row["temperature"] for row in found} == {0.0, 0.7, 1.3}
    assert len({row["seed"] for row in found}) == len(found)
    for row in found:
        sampling = {"do_sample": True, "temperature": row["temperature"], "seed": row["seed"], "top_k": 0}
        how = sampling if row["temperature"] else {"do_sample": False}
        for begin, end in answers(row):
            ids = torch.tensor([row["input_ids"][:begin]])
            assert pair.engine.generate(ids, max_new_tokens=NEW, **how)[0].tolist() == row["input_ids"][:end]
    assert any(row["input_ids"][end - 1] == EOS for row in found for _, end in answers(row))
    assert any(row["input_ids"][end - 1] != EOS for row in found for _, end in answers(row))


def test_a_conversation_goes_on_from_the_bases_own_answers(pair, config):
    """The ids around the answers are the template's, also the end of a turn that the base did not write itself."""
    talks = [ROWS[3], *(talk("system:short", f"{letter}?", "a", "and you?", "b", "bye", "c") for letter in "abcdefgh")]
    ended = set()
    for talked, row in zip(talks, written(pair, talks, replace(config, max_new_tokens=9)), strict=True):
        own = [row["input_ids"][begin:end] for begin, end in answers(row)]
        expected, spoken = pair.tokenizer("<s>")["input_ids"], iter(own)
        for turn, following in zip(talked.messages, [*talked.messages[1:], None], strict=True):
            text = f"<|{turn['role']}|>{turn['content']}\n"
            if turn["role"] == "assistant":
                expected += (answer := next(spoken))
                text = "" if following is None else "\n" if answer[-1] == EOS else "</s>\n"
                ended.add(text)
            elif following["role"] == "assistant":
                text += "<|assistant|>"
            expected += pair.tokenizer(text)["input_ids"]
        assert row["input_ids"] == expected
        assert row["finish"] == ("eos" if all(answer[-1] == EOS for answer in own) else "length")
    assert ended == {"", "\n", "</s>\n"}, "answers end in one way only: the test shows half"


def test_prompts_without_answers_are_answered_turn_by_turn(pair, config):
    (row,) = written(pair, [ROWS[5]], config)
    assert len(answers(row)) == 2
    assert row["shown"].index("one") < row["shown"].index("two")


def test_a_prompt_is_answered_and_its_own_answer_left_out(pair, config):
    rows = [Row("p:1", prompt="so ", answer="it is not"), Row("p:2", prompt="so ")]
    for row in written(pair, rows, config):
        start = len(pair.tokenizer("so ").input_ids)
        assert row["input_ids"][:start] == pair.tokenizer("so ").input_ids
        assert row["loss_mask"] == [0] * start + [1] * (len(row["input_ids"]) - start)
        assert answers(row)[0][0] == start


def test_a_base_invents_questions_and_learns_from_its_answers_alone(pair, config, tmp_path):
    rows = [*ROWS[:2], *invented_rows(9)]
    found = written(pair, rows, config)
    opening = pair.tokenizer("<s><|user|>")["input_ids"]
    ended = set()
    for row in found[2:]:
        ((begin, end),) = answers(row)
        ids, sampling = row["input_ids"], {"do_sample": True, "seed": row["seed"], "top_k": 0}
        assert ids[: len(opening)] == opening
        start = torch.tensor([opening])
        asked = pair.engine.generate(start, max_new_tokens=NEW, temperature=QUESTION_TEMPERATURE, **sampling)[
            0
        ].tolist()
        ended.add(asked[-1] == EOS)
        assert ids[:begin] == asked + pair.tokenizer("\n<|assistant|>")["input_ids"]
        how = sampling | {"temperature": row["temperature"]} if row["temperature"] else {"do_sample": False}
        answer = pair.engine.generate(torch.tensor([ids[:begin]]), max_new_tokens=NEW, **how)[0].tolist()
        assert answer == ids[:end]
        assert row["source"] == "invented"
    assert ended == {False, True}, "questions end in one way only: the test shows half"
    assert len({tuple(row["input_ids"]) for row in found[2:]}) > 6
    other = replace(config, output=str(tmp_path / "other.jsonl"), batch_size=1, invent=9)
    assert written(pair, rows, other) == found
    assert MAX_QUESTION_TOKENS > NEW


def test_texts_begin_with_a_drawn_number_of_tokens_and_ids_with_what_was_not_trained_on(pair, config):
    texts = [Row(f"t:{n}", text="abcdefgh" * 40) for n in range(40)]
    starts = [answers(row)[0][0] for row in written(pair, [*texts, ROWS[2], ROWS[4]], config)]
    assert min(starts[:40]) >= 16
    assert max(starts[:40]) <= 64
    assert len(set(starts[:40])) > 10
    assert starts[40:] == [2, 3]


def test_rows_say_what_made_them_and_can_be_trained_on(pair, config):
    rows = [*ROWS[:2], replace(ROWS[2], split="train")]
    found = written(pair, rows, config)
    assert [row["source"] for row in found] == ["novel", None, None]
    assert [row.get("split") for row in found] == [None, None, "train"]
    assert {row["tokenizer"] for row in found} == {fingerprint(pair.tokenizer)}
    assert {row["base"] for row in found} == {"LlamaForCausalLM"}
    for document, record in zip(encode_documents(read_rows([config.output]), pair.tokenizer), found, strict=True):
        assert document.ids == record["input_ids"]
        assert document.mask == [bool(own) for own in record["loss_mask"]]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_rows_depend_on_no_batch_and_no_drafter(pair, config, batch_size, tmp_path):
    plain = written(pair, ROWS, config)
    drafted = replace(pair, engine=with_tree(pair.engine.model, drafter(), 3, 3))
    other = replace(config, output=str(tmp_path / "other.jsonl"), batch_size=batch_size)
    assert written(drafted, ROWS, other) == plain
    assert written(drafted, ROWS, replace(other, seed=6, overwrite=True)) != plain


def test_shards_make_up_the_whole(pair, config, tmp_path):
    whole = written(pair, ROWS, replace(config, limit=7))
    parts = [replace(config, limit=7, shard=f"{n}/3", output=str(tmp_path / f"{n}.jsonl")) for n in range(3)]
    for part in parts:
        regenerate(pair, ROWS, part, log=quiet)
    found = [row for part in parts for row in lines(part.output)]
    assert sorted(found, key=lambda row: row["row"]) == whole
    assert len(whole) == 7


def test_what_follows_an_answer_is_tokenised_as_it_stands_there():
    """Many tokenizers put a space before a text; after other text there is none."""
    vocab = {word: index for index, word in enumerate(["<unk>", "▁Mark", "▁", "▁and", "and", "M", "a"])}
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in vocab], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    made.chat_template = "{{ messages }}"
    assert RowChat(Row("row", messages=[]), made).encode_after("Markand", 4) == [vocab["and"]]
    assert made("and", add_special_tokens=False)["input_ids"] == [vocab["▁and"]]


def test_as_many_rows_as_asked_for_are_decoded_at_once_and_others_take_the_slots_of_those_that_end(
    pair, config, monkeypatch
):
    steps = noted(monkeypatch, RunningBatch, "step", lambda _, batch, *chunks: len(batch.rows))
    calls = noted(monkeypatch, AnswerWriter, "decode", lambda _, writer, batch: len(batch))
    long = replace(config, limit=None, batch_size=300, temperatures=(0.0,), max_new_tokens=2)
    rows = [Row(f"t:{number}", ids=[1, 40 + number % 20, 50, 60]) for number in range(310)]
    written(pair, rows, long)
    assert max(steps) == 300, "more than an engine decodes at once unless asked to"
    steps.clear()
    calls.clear()
    written(pair, rows[:12], replace(config, temperatures=(0.0,), overwrite=True))
    assert max(steps) == config.batch_size == 3
    assert calls[0] == 4 * config.batch_size


def test_prompts_are_tokenised_while_a_batch_is_decoded(pair, config, monkeypatch):
    tokenised, decode, make = threading.Event(), AnswerWriter.decode, answer_writer.make_task

    def made(number: int, *arguments: object) -> Task:
        task = make(number, *arguments)
        if number == 2:  # the first row that is not of the first two batches
            tokenised.set()
        return task

    def decoded(self: AnswerWriter, batch: list[Task]) -> object:
        assert tokenised.wait(300), "row 2 is tokenized only after the batch"
        return decode(self, batch)

    rows = [talk(f"number {number}", "x") for number in range(4)]
    expected = written(pair, rows, config)
    monkeypatch.setattr(answer_writer, "make_task", made)
    monkeypatch.setattr(AnswerWriter, "decode", decoded)
    assert written(pair, rows, replace(config, batch_size=1, overwrite=True)) == expected


# Rows that fail, and the count of all


def test_rows_that_fail_are_counted_and_stop_nothing(pair, config):
    rows_and_errors = [
        (talk("BAD", "x"), "the chat template refuses: no"),
        (ROWS[1], None),
        (Row("late", messages=[{"role": r, "content": r} for r in ("assistant", "user")]), "before any user"),
        (Row("alone", messages=[{"role": "system", "content": "a"}]), "no user turn"),
        (Row("empty", text=""), "empty"),
        (talk("long " * 40, "x"), f"most {CONTEXT - 1}"),
        (Row("other", ids=[1, 2], loss_mask=[False, True], tokenizer="0" * 16), "tokenizer"),
        (Row("unknown", ids=[VOCAB, 2], loss_mask=[False, True]), f"knows {VOCAB}"),
        (Row("untrained", ids=[1, 2], loss_mask=[False, False]), "loss_mask"),
        (replace(ROWS[2], split="val"), None),
        (ROWS[3], None),
    ]
    rows = [row for row, _ in rows_and_errors]
    said = list[str]()
    summary = regenerate(pair, rows, config, log=said.append)
    assert [row["row"] for row in lines(config.output)] == [1, 10]
    errors = iter([line for line in said if "fails" in line])
    for number, (row, reason) in enumerate(rows_and_errors):
        if reason:
            error = next(errors)
            assert error.startswith(f"row {number} fails: {row.where}: ")
            assert reason in error
    assert (summary.input, summary.answered, summary.errors, summary.skipped) == (11, 2, 8, 1)
    assert summary.tokens == sum(sum(row["loss_mask"]) for row in lines(config.output))


def test_rows_that_end_before_a_tool_result_are_counted(pair, config):
    turns = (("user", "hi"), ("assistant", "[wx]"), ("tool", "9 C"), ("assistant", "cold"))
    messages = [{"role": role, "content": content} for role, content in turns]
    summary = regenerate(pair, [Row("t:1", messages=messages), ROWS[1]], config, log=quiet)
    ended, other = sorted(lines(config.output), key=lambda row: row["row"])
    assert (ended["finish"], len(answers(ended)), "9 C" in ended["shown"]) == ("tool", 1, False)
    assert (summary.ended_at_tools, other["finish"] in ("eos", "length")) == (1, True)


def test_longest_prompt_ends_a_conversation_and_keeps_its_first_turns(pair, config):
    config = replace(config, max_input_len=20)
    (row,) = written(pair, [ROWS[1]], config)
    assert len(answers(row)) == 1
    assert answers(row)[0][0] <= 20
    assert row["finish"] == "length"


def test_a_base_that_ends_at_once_leaves_nothing_to_learn(pair, config):
    config = replace(config, max_new_tokens=1)
    with pytest.raises(CheckpointError, match=r"none of 1 rows could be answered; t:1: the base ended at once"):
        regenerate(pair, ROWS[:1], config, log=quiet)
    assert not list(Path(config.output).parent.iterdir())


def test_val_rows_are_answered_when_asked_for(pair, config):
    rows = [ROWS[0], replace(ROWS[2], split="val")]
    assert [row["split"] for row in written(pair, rows, replace(config, split="val"))] == ["val"]


# Interruptions


def test_short_memory_halves_the_batch_and_a_row_that_never_fits_fails(pair, config, monkeypatch):
    plain = written(pair, ROWS, config)
    said, decode = [], answer_writer.AnswerWriter.decode

    def short(self, batch):
        if len(batch) > 2 or any(task.number == 6 for task in batch):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, batch)

    monkeypatch.setattr(answer_writer.AnswerWriter, "decode", short)
    config = replace(config, batch_size=8, overwrite=True)
    summary = regenerate(pair, ROWS, config, log=said.append)
    found = sorted(lines(config.output), key=lambda row: row["row"])
    assert found == [row for row in plain if row["row"] != 6]
    assert "out of memory with" in said[1]
    assert "--batch-size" in said[1]
    assert summary.errors == 1
    assert any(re.match("row 6 fails: .*out of memory", line) for line in said)


class Stop(Exception):
    pass


def stopped(pair, config, monkeypatch, batches: int) -> Path:
    """Return the output of a run that was stopped after some batches."""
    settle = answer_writer.AnswerWriter.settle

    def settle_or_stop(self, tasks):
        settle(self, tasks)
        nonlocal batches
        batches -= 1
        if batches == 0:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(answer_writer.AnswerWriter, "settle", settle_or_stop)
        regenerate(pair, ROWS, config, log=quiet)
    return Path(config.output)


def test_a_torn_last_line_is_dropped_and_its_row_answered_again(pair, config, monkeypatch, tmp_path):
    whole = written(pair, ROWS, replace(config, output=str(tmp_path / "whole.jsonl")))
    output = stopped(pair, config, monkeypatch, 3)
    found = output.read_bytes()
    rows = found.splitlines(keepends=True)
    assert 0 < len(rows) < len(ROWS)
    for cut in (1, 30, len(rows[-1]) - 9):
        output.write_bytes(found[:-cut])
        assert written(pair, ROWS, config) == whole


@pytest.mark.parametrize("cut", [None, lambda answer: answer[:2], lambda answer: [EOS]])
def test_minutes_end_a_run_with_whole_answers_only_and_the_same_command_continues(
    pair, config, monkeypatch, tmp_path, cut
):
    whole = written(pair, ROWS, replace(config, batch_size=1, output=str(tmp_path / "whole.jsonl")))
    decode, calls = AnswerWriter.decode, []

    def late(self: AnswerWriter, batch: list[Task]) -> object:
        calls.append(batch)
        run = decode(self, batch) if cut else None
        if len(calls) == 4:  # of the last answer of the second row
            self.deadline = time.perf_counter()
            if run is not None:
                run.tokens[:] = map(cut, run.tokens)
        return run or decode(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(AnswerWriter, "decode", late)
        regenerate(pair, ROWS, replace(config, batch_size=1, minutes=60.0), log=quiet)
    assert len(calls) == 4
    found = lines(config.output)
    assert 0 < len(found) < 4
    assert all(row in whole for row in found)
    assert written(pair, ROWS, replace(config, batch_size=1)) == whole


def test_what_was_answered_is_not_answered_again(pair, config, monkeypatch):
    settled = {row["row"] for row in lines(stopped(pair, config, monkeypatch, 3))}
    seen, decode = set[int](), answer_writer.AnswerWriter.decode

    def watched(self, batch):
        seen.update(task.number for task in batch)
        return decode(self, batch)

    monkeypatch.setattr(answer_writer.AnswerWriter, "decode", watched)
    summary = regenerate(pair, ROWS, config, log=quiet)
    assert settled
    assert seen == set(range(len(ROWS))) - settled
    assert (summary.found, summary.answered) == (len(settled), len(seen))
    assert regenerate(pair, ROWS, config, log=quiet).found == len(ROWS)


@pytest.mark.parametrize(
    ("change", "rows", "name"),
    [
        ({"seed": 6}, ROWS, "seed"),
        ({"temperatures": (0.3,)}, ROWS, "temperature"),
        ({}, [replace(row, where=f"other:{number}") for number, row in enumerate(ROWS)], "prompt"),
    ],
)
def test_rows_of_another_run_are_refused_by_name(pair, config, monkeypatch, change, rows, name):
    output = stopped(pair, config, monkeypatch, 1)
    before = output.read_bytes()
    with pytest.raises(ArgumentError, match=rf"own\.jsonl holds row \d with {name} .* name another --output"):
        regenerate(pair, rows, replace(config, **change), log=quiet)
    assert output.read_bytes() == before
    regenerate(pair, ROWS, replace(config, batch_size=1), log=quiet)  # which changes nothing


@pytest.mark.parametrize("text", ["mine", "notes\n", '{"text": "a"}\n', '{"row": 1}\n', "[]\n"])
def test_a_file_of_other_lines_is_kept_unless_asked(pair, config, text):
    Path(config.output).write_text(text)
    with pytest.raises(ArgumentError, match=r"own\.jsonl:1 is no row of redrafter regenerate: .* --overwrite"):
        regenerate(pair, ROWS[:1], config, log=quiet)
    assert Path(config.output).read_text() == text
    assert len(written(pair, ROWS[:1], replace(config, overwrite=True))) == 1


# The command


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory) -> Path:
    """Save the base, its tokenizer, a drafter beside it, and a data set."""
    folder = tmp_path_factory.mktemp("regenerate")
    pair.engine.model.save_pretrained(folder / "base")
    pair.tokenizer.save_pretrained(folder / "base")
    drafter().save_pretrained(folder / "drafter")
    rows = [{"messages": talk("hi", "hello", f"number {n}?", "yes").messages} for n in range(120)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(saved: Path, output: Path, *more: str) -> list[str]:
    files = ["--model", str(saved / "base"), "--data", str(saved / "data.jsonl"), "--output", str(output)]
    return ["regenerate", *files, "--batch_size", "4", "--max-new-tokens", "6", *more]


def test_command_writes_the_same_with_and_without_a_drafter(saved, tmp_path, capsys):
    assert redrafter.cli.main(command(saved, tmp_path / "plain.jsonl", "--limit", "9")) == 0
    out, err = capsys.readouterr()
    assert "plain.jsonl: 9 of 9 rows, 0 errors, 0 skipped" in out
    assert "row 9/9" in err
    drafted = command(saved, tmp_path / "drafted.jsonl", "--limit", "9", "--drafter", str(saved / "drafter"))
    assert redrafter.cli.main(drafted) == 0
    files = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("drafted", "plain")]
    assert sorted(files[0]) == sorted(files[1])
    assert {row["base"] for row in lines(tmp_path / "plain.jsonl")} == {"base"}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--shard", "2/2"], "--shard must be I/N"),
        (["--temperatures", "-1"], "--temperatures must be 0"),
        (["--temperatures", "0", "--top-p", "0.5"], "--top-p"),
        (["--split", "test"], "no row for --split test"),
        (["--output", "/nowhere/own.jsonl"], "cannot write /nowhere/own.jsonl (--output)"),
        (["--invent", "-1"], "--invent must be 0 or more, got -1"),
    ],
)
def test_command_says_in_one_line_what_is_wrong(saved, tmp_path, capsys, more, reason):
    assert reason in fails(capsys, *command(saved, tmp_path / "own.jsonl", *more))
    assert not list(tmp_path.iterdir())


def test_a_base_needs_no_data_to_answer_its_own_questions(saved, tmp_path, capsys):
    output = tmp_path / "own.jsonl"
    asked = ["regenerate", "--model", str(saved / "base"), "--output", str(output)]
    assert "give --data FILE, --invent N, or both" in fails(capsys, *asked)
    assert "--invent: no row for --split val" in fails(capsys, *asked, "--invent", "2", "--split", "val")
    assert redrafter.cli.main([*asked, "--invent", "3", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert {row["prompt"] for row in lines(output)} == {f"invented:{number}" for number in (1, 2, 3)}


def test_a_drafter_drafts_where_there_is_one_and_else_a_table(saved):
    plain = parse(command(saved, Path("own.jsonl"))[1:])
    assert type(load(plain).engine.drafter) is RecycledTokens
    assert type(load(replace(plain, drafter=str(saved / "drafter"))).engine.drafter) is RecurrentDrafter
    assert type(load(replace(plain, model=str(boxed_pair()))).engine.drafter) is RecurrentDrafter


@pytest.mark.slow
def test_ctrl_c_says_that_the_same_command_continues(saved, tmp_path, monkeypatch, capsys):
    decode, calls = AnswerWriter.decode, []

    def interrupted(writer, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(writer, batch)

    monkeypatch.setattr(AnswerWriter, "decode", interrupted)
    assert redrafter.cli.main(command(saved, tmp_path / "own.jsonl")) == 130
    err = capsys.readouterr().err
    assert re.search(r"^row 0/\d+ ", err, re.MULTILINE)
    assert re.search(r"\nredrafter: stopped: \d+ rows are saved; the same command continues\n$", err)


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_continues(saved, tmp_path):
    whole, own = tmp_path / "whole.jsonl", tmp_path / "own.jsonl"
    assert redrafter.cli.main(command(saved, whole)) == 0
    process = start(command(saved, own), Path(os.devnull))
    while process.is_alive() and not (own.exists() and own.read_bytes().count(b"\n") >= 8):
        time.sleep(0.002)
    process.kill()
    process.join()
    assert 8 <= own.read_bytes().count(b"\n") < 120
    assert redrafter.cli.main(command(saved, own)) == 0
    assert sorted(own.read_text().splitlines()) == sorted(whole.read_text().splitlines())
