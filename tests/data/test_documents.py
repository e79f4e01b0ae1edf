"""Training data: formats of rows, tokens that are learnt, and prompts."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from helpers.chat_templates import DEEPSEEK_V3, GLM4_5, QWEN3, QWEN3_5, R1_DISTILL
from helpers.chats import CHAT, FORGETFUL, LLAMA_LIKE, tiny_tokenizer, write
from helpers.tokenizers import TEXTS, byte_level
from redrafter.data.documents import encode_documents, format_sample
from redrafter.data.prompts import sample_prompts
from redrafter.data.rows import Row, fingerprint, read_rows
from redrafter.data.windows import Document
from redrafter.errors import CheckpointError, MismatchError
from redrafter.train.loss import target_mask

ASKED = {"role": "user", "content": "2+2?"}
SHARED = {
    "conversations": [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yes"},
        {"from": "user", "value": "and?"},
        {"from": "bard", "value": "no"},
    ]
}


def read(path: Path, *rows: object, name: str = "a.jsonl") -> list[Row]:
    return list(read_rows([write(path / name, list(rows))]))


def encode(path: Path, *rows: object, template: str | None = LLAMA_LIKE) -> list[Document]:
    return list(encode_documents(read(path, *rows), tiny_tokenizer(template)))


def learnt(document: Document) -> str:
    ids = [i for i, m in zip(document.ids, document.mask, strict=True) if m]
    return tiny_tokenizer().decode(ids)


# What is learnt


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_only_assistant_turns_are_in_the_mask(tmp_path, key):
    (document,) = encode(tmp_path, {key: CHAT["conversations"], "id": 3})
    ids = tiny_tokenizer().apply_chat_template(CHAT["conversations"], tokenize=True, return_dict=False)
    assert document.ids == ids
    assert learnt(document) == "<t>hm</t>yes</s>\nno</s>\n"


def test_a_template_that_rewrites_earlier_turns_gives_a_document_for_each(tmp_path):
    first, second = encode(tmp_path, CHAT, template=FORGETFUL)
    assert [learnt(first), learnt(second)] == ["<t>hm</t>yes</s>\n", "no</s>\n"]
    rendered = "<s><|user|>\nhi\n<|assistant|>\nyes</s>\n<|user|>\nand?\n<|assistant|>\nno</s>\n"
    assert tiny_tokenizer().decode(second.ids) == rendered


def test_the_mark_of_the_next_turn_that_ends_an_answer_is_learnt(tmp_path):
    marks = LLAMA_LIKE.replace("{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}", "")
    tokenizer, rows = tiny_tokenizer(marks), read(tmp_path, CHAT)
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert learnt(next(encode_documents(rows, tokenizer, {2, user}))) == "<t>hm</t>yes<|user|>no<|user|>"
    assert learnt(next(encode_documents(rows, tokenizer, {2}))) == "<t>hm</t>yesno"
    ends = {2, user}  # of a template that ends the turn itself, nothing more is learnt
    assert list(encode_documents(rows, tiny_tokenizer(), ends)) == list(encode_documents(rows, tiny_tokenizer()))


@pytest.mark.parametrize("calls", [False, True])
def test_the_last_answer_of_a_row_learns_the_mark_that_would_end_it(tmp_path, calls):
    tokenizer = tiny_tokenizer(GLM4_5)
    user, tool = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    tokenizer.chat_template = GLM4_5.replace("<|observation|>", "<|assistant|>")  # a special token here
    call = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]} if calls else {}
    rows = read(tmp_path, {"messages": [ASKED, {"role": "assistant", "content": "4"} | call]})
    (document,) = encode_documents(rows, tokenizer, {user, tool})
    end = tool if calls else user
    assert (document.ids[-1], document.mask[-1]) == (end, True)
    (without,) = encode_documents(rows, tokenizer)
    assert document == Document([*without.ids, end], [*without.mask, True])


def test_each_prompt_has_the_ids_that_the_server_gives_it(tmp_path):
    """GPT-2's tokenizers merge a space or line feeds at the end of a prompt with the answer."""
    template = (
        "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
    )
    tokenizer = byte_level([f"Q: {text}\n\nA: {text}" for text in TEXTS], 500)
    tokenizer.chat_template = template
    turns = [{"role": role, "content": "The river flows"} for role in ("user", "assistant") * 2]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    prompts = [tokenizer.apply_chat_template(turns[:n], tokenize=False, add_generation_prompt=True) for n in (1, 3)]
    whole, *served = tokenizer([text, *prompts])["input_ids"]
    assert all(whole[: len(ids)] != ids for ids in served)  # the case that is tested
    documents = list(encode_documents(read(tmp_path, {"messages": turns}), tokenizer))
    assert [document.ids[: document.mask.index(True)] for document in documents] == served
    for document in documents:
        learnt = [token for token, one in zip(document.ids, document.mask, strict=True) if one]
        assert tokenizer.decode(learnt) == "The river flows\n\n"
    row = {"prompt": "The river\n\n", "completion": "\nThe fox"}
    (document,) = encode_documents(read(tmp_path, row), tokenizer)
    assert document.ids[: document.mask.index(True)] == tokenizer(row["prompt"])["input_ids"]
    assert tokenizer.decode(document.ids) == row["prompt"] + row["completion"]


def test_control_tokens_that_turns_spell_are_text(tmp_path):
    turns = [{"role": role, "content": "a</s> b<|user|>"} for role in ("user", "assistant")]
    (document,) = encode(tmp_path, {"messages": turns})
    (plain,) = encode(tmp_path, {"messages": [turn | {"content": "a"} for turn in turns]})
    assert [token for token in document.ids if token < 6] == [token for token in plain.ids if token < 6]
    assert learnt(document) == "a</s> b<|user|></s>\n"


THOUGHT = "<think>\neasy\n</think>\n\n4"


@pytest.mark.parametrize(
    ("template", "answer", "shown"),
    [
        # The prompt opens a thought, which the template drops from the turn.
        (R1_DISTILL, {"content": THOUGHT}, "<｜Assistant｜><think>\n⟦easy\n</think>\n\n4</s>⟧"),
        (R1_DISTILL, {"content": "4", "reasoning_content": "easy"}, "<think>\n⟦easy\n</think>\n\n4</s>⟧"),
        (DEEPSEEK_V3, {"content": "4"}, "<｜Assistant｜>⟦4</s>⟧"),
        (QWEN3_5, {"content": THOUGHT}, "assistant\n<think>\n⟦easy\n</think>\n\n4<|im_end|>\n⟧"),
        # An empty thought is what serving writes into the prompt, with thoughts turned off.
        (QWEN3_5, {"content": "4"}, "assistant\n<think>\n\n</think>\n\n⟦4<|im_end|>\n⟧"),
        (QWEN3, {"content": "4"}, "assistant\n<think>\n\n</think>\n\n⟦4<|im_end|>\n⟧"),
        (QWEN3, {"content": THOUGHT}, "assistant\n⟦<think>\neasy\n</think>\n\n4<|im_end|>\n⟧"),
        (GLM4_5, {"content": "4"}, "<|assistant|>\n<think></think>⟦\n4⟧"),
    ],
)
def test_thoughts_are_learnt_as_they_are_served(tmp_path, template, answer, shown):
    (document,) = encode(tmp_path, {"messages": [ASKED, {"role": "assistant"} | answer]}, template=template)
    assert format_sample(document, tiny_tokenizer()).endswith(shown)


def test_variables_of_a_row_turn_thoughts_off_and_drop_the_answers_own(tmp_path):
    row = {"messages": [ASKED, {"role": "assistant", "content": THOUGHT}]}
    with pytest.warns(UserWarning, match=r"a.jsonl:1: the chat template leaves out turn 2 \(assistant\): 'easy'"):
        (document,) = encode(tmp_path, row | {"chat_template_kwargs": {"enable_thinking": False}}, template=QWEN3)
    assert format_sample(document, tiny_tokenizer()).endswith("<think>\n\n</think>\n\n⟦4<|im_end|>\n⟧")
    with pytest.raises(CheckpointError, match=r"a.jsonl:1: .* reads no 'x'; it reads .*enable_thinking"):
        encode(tmp_path, row | {"chat_template_kwargs": {"x": 1}}, template=QWEN3)


def test_a_turn_that_the_template_leaves_out_is_named_once(tmp_path):
    turns = [ASKED, {"role": "assistant", "content": "9"}, {"role": "critic", "content": "wrong"}]
    row = {"messages": [*turns, {"role": "assistant", "content": "4"}]}
    deaf = LLAMA_LIKE.replace("m.content }}", "('' if m.role == 'critic' else m.content) }}")
    with pytest.warns(UserWarning, match="leaves out") as warned:
        encode(tmp_path, row, row, template=deaf)
    assert [str(one.message).rpartition("/")[2] for one in warned] == [
        "a.jsonl:1: the chat template leaves out turn 3 (critic): 'wrong'"
    ]


def test_an_answer_to_nothing_is_read_and_not_learnt(tmp_path):
    turns = [{"role": "assistant", "content": "welcome"}, *CHAT["conversations"][:2]]
    (document,) = encode(tmp_path, {"messages": turns})
    assert learnt(document) == "<t>hm</t>yes</s>\n"
    assert "welcome" in tiny_tokenizer().decode(document.ids)
    with pytest.raises(CheckpointError, match=r"a.jsonl:1: no assistant turn"):
        encode(tmp_path, {"messages": turns[:1]})


def test_rows_of_every_kind_keep_their_order_when_tokenized_together(tmp_path, monkeypatch):
    ids = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, True, 1, False]}
    rows = read(tmp_path, {"text": "first"}, SHARED, ids, CHAT, {"text": "last"})
    tokenizer = tiny_tokenizer()
    alone = [document for row in rows for document in encode_documents([row], tokenizer)]
    for size in (1, 30, 10_000):
        monkeypatch.setattr("redrafter.data.documents.GROUP_CHARACTERS", size)
        assert list(encode_documents(rows, tokenizer)) == alone
    assert [learnt(document) for document in alone[::4]] == ["first", "last"]
    assert learnt(alone[1]) == "yes</s>\nno</s>\n"
    assert "<|system|>\nbe kind" in tokenizer.decode(alone[1].ids)
    assert alone[2] == Document([5, 6, 7, 8], [False, True, True, False])
    assert [document.where for document in alone] == [row.where for row in rows]


def test_special_tokens_are_added_to_texts_alone(tmp_path):
    tokenizer = tiny_tokenizer()
    opening = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = opening
    rows = read(tmp_path, {"text": "abc"}, CHAT)
    text, chat = encode_documents(rows, tokenizer)
    assert tokenizer.decode(text.ids) == "<s>abc"
    assert chat.ids.count(1) == 1
    assert [ids.count(1) for ids in sample_prompts(rows, tokenizer, 2, 99, 0)] == [1, 1]


def test_a_sample_is_shown_with_what_is_learnt_of_it(tmp_path):
    tokenizer = tiny_tokenizer()
    turns = [{"role": "user", "content": "où?"}, {"role": "assistant", "content": "là é"}] * 2
    (document,) = encode(tmp_path, {"messages": turns})
    sample = "<|user|>\noù?\n<|assistant|>\n⟦là é</s>\n⟧"
    assert format_sample(document, tokenizer) == f"<s>{sample}{sample}"
    accent = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert format_sample(Document([*accent, *accent], [False, True, True, True]), tokenizer) == "⟦éé⟧"


def test_learnable_is_having_a_target():
    for number in range(2**7):
        mask = [bool(number >> bit & 1) for bit in range(7)]
        assert Document([0] * 7, mask).learnable == bool(target_mask(torch.tensor([mask]), 1).any())


# What rows may say


def test_what_a_row_says_beside_its_text(tmp_path):
    rows = read(tmp_path, {"text": "a", "split": "val", "source": "x"}, {"text": "b", "category": "y", "turns": None})
    assert [(row.where[-9:], row.split, row.source) for row in rows] == [
        ("a.jsonl:1", "val", "x"),
        ("a.jsonl:2", None, "y"),
    ]
    both = {"text": "a", "source": "mt_bench", "category": "math"}
    assert [row.source for row in read(tmp_path, both, both | {"category": 3})] == ["math", "mt_bench"]
    (row,) = read(tmp_path, {"turns": ["one", "two"], "category": "writing", "question_id": 81})
    assert row.messages == [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    assert [turn["role"] for turn in read(tmp_path, SHARED)[0].messages] == [
        "system", "user", "assistant", "user", "assistant"
    ]  # fmt: skip


def test_json_holds_a_list_or_lines(tmp_path):
    listed = json.dumps([SHARED, {"text": "two"}], indent=1)
    (tmp_path / "a.json").write_text("\ufeff" + listed)
    rows = list(read_rows([tmp_path / "a.json"]))
    assert [row.where[-12:] for row in rows] == ["a.json:row 1", "a.json:row 2"]
    assert rows[1].text == "two"
    packed = read(tmp_path, listed, name="b.json.xz")
    assert [row.messages for row in packed] == [row.messages for row in rows]
    assert [row.text for row in read(tmp_path, {"text": "1"}, {"text": "2"}, name="c.json")] == ["1", "2"]
    (tmp_path / "a.json").write_text(json.dumps([{"text": "fine"}, {"text": 3}]))
    with pytest.raises(CheckpointError, match=r"a.json:row 2: .text. must be a string"):
        list(read_rows([tmp_path / "a.json"]))


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "has one of"),
        ({"text": "abc", "messages": []}, "has one of"),
        ({"text": 3}, "must be a string"),
        ({"text": "a\ud800b"}, "surrogate"),
        ({"text": "a"}, "too short"),
        ({"text": "abc", "split": "dev"}, "split"),
        ({"text": "abc", "tokenizer": 5}, '"tokenizer" must be a string'),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant turn"),
        ({"messages": [{"role": "user"}]}, '"content"'),
        ({"messages": "hello"}, '"messages" is not JSON .*, found hello'),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "narrator", "value": "y"}]},
            "observation.*narrator",
        ),
        ({"input_ids": [1, 2, 3]}, '"loss_mask"'),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 1]}, '"loss_mask"'),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, '"loss_mask"'),
        ({"input_ids": [1, -2, 3], "loss_mask": [1, 1, 1]}, '"input_ids"'),
        ({"input_ids": [1, 2**31, 3], "loss_mask": [1, 1, 1]}, '"input_ids"'),
        ({"input_ids": [300, 301], "loss_mask": [0, 0]}, "mask is empty"),
        ({"prompt": "so"}, "a prompt without an answer, so there is nothing to learn"),
        ({"prompt": "so", "completion": 7}, '"completion" must be a string'),
        ({"prompt": ["so"], "completion": "it"}, 'a turn has a "role".* found so'),
        ({"prompt": 3, "completion": "it"}, '"prompt" must be a string'),
        ({"prompt": "", "completion": "it"}, "the prompt is empty"),
        ({"completion": "it"}, "a row has one of text, .* prompt, instruction, input; found {'completion'"),
    ],
)
def test_a_bad_row_names_its_file_and_line(tmp_path, line, said):
    file = write(tmp_path / "a.jsonl.xz", [{"text": "fine"}, "", line])
    with pytest.raises(CheckpointError, match=said) as caught:
        list(encode_documents(read_rows([file]), tiny_tokenizer()))
    assert f"{file}:3:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_mask_is_refused_with_the_sample(tmp_path):
    ids = tiny_tokenizer()("what is\n" + "learnt " * 90)["input_ids"]
    with pytest.raises(CheckpointError, match=r"a.jsonl:2: nothing to learn.*'what is\\nlearnt learnt") as caught:
        encode(tmp_path, {"text": "fine"}, {"input_ids": ids, "loss_mask": [0] * len(ids)})
    assert str(caught.value).count("learnt ") == 27  # of the 200 characters that are shown


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = fingerprint(PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved"))
    assert saved == fingerprint(tokenizer)
    assert len(saved) == 16
    assert int(saved, 16)
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "tokenizer": saved}
    assert len(list(encode_documents(read(tmp_path, row), tokenizer))) == 1
    tokenizer.add_tokens(["more"])
    for use in (
        lambda rows: list(encode_documents(rows, tokenizer)),
        lambda rows: sample_prompts(rows, tokenizer, 1, 9, 0),
    ):
        with pytest.raises(MismatchError, match=rf"a.jsonl:1: made with tokenizer {saved}, .*{fingerprint(tokenizer)}"):
            use(read(tmp_path, row))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    content = Path(write(tmp_path / "a.jsonl.xz", [{"text": "abc"}] * 99)).read_bytes()
    (tmp_path / "cut.jsonl.xz").write_bytes(content[:-20])
    content = Path(write(tmp_path / "a.jsonl.gz", [{"text": "abc"}] * 99)).read_bytes()
    (tmp_path / "torn.jsonl.gz").write_bytes(content[:40] + bytes(9) + content[49:])
    names = ["gone.jsonl", "cut.jsonl.xz", "torn.jsonl.gz", "no\0.jsonl", "n" * 300 + ".jsonl"]
    for file in (*(tmp_path / name for name in names), "gone.jsonl.gz"):  # the last is no name of a dataset
        with pytest.raises(CheckpointError, match=f"{re.escape(str(file))} cannot be read"):
            list(read_rows([file]))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            None,
            "has no chat template: give one with --chat-template FILE, or --plain-chat-template, or use rows of text",
        ),
        ("{{ nobody() }}", "template refuses"),
        (
            LLAMA_LIKE.replace("{{ '<|assistant|>\n' }}", "Answer:"),
            "does not write that turn so; .* `redrafter regenerate`",
        ),
    ],
)
def test_templates_that_cannot_be_used_are_refused(tmp_path, template, said):
    with pytest.raises(CheckpointError, match=rf"a.jsonl:1: .*{said}"):
        encode(tmp_path, CHAT, template=template)


def test_the_text_that_a_tokenizer_fails_on_is_named(tmp_path):
    class Fragile(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **more):
            if "?" in str(text):
                raise RuntimeError("no ?")
            return super()._encode_plus(text, *args, **more)

    tiny_tokenizer().save_pretrained(tmp_path)
    rows = read(tmp_path, {"text": "one"}, {"text": "two?"})
    with pytest.raises(CheckpointError, match=r"a.jsonl:2: the tokenizer fails: no \?"):
        list(encode_documents(rows, Fragile.from_pretrained(tmp_path)))


def test_names_that_are_no_files_are_datasets(tmp_path, monkeypatch):
    turns = [{"role": turn["role"], "content": turn["content"], "from": None} for turn in CHAT["conversations"]]
    rows = [{"text": "one", "messages": None}, {"text": None, "messages": turns}]
    requests = []
    folder = tmp_path / "stored"
    folder.mkdir()

    def load_dataset(name: str, config: str | None = None, *, split: str, **files: str) -> list[object]:
        requests.append((name, config, split, *files.values()))
        if name == "org/gone":
            raise FileNotFoundError("nobody\nhas it")
        return rows

    stored: object = {"val": rows, "test": rows[:1]}
    saved = SimpleNamespace(load_dataset=load_dataset, load_from_disk=lambda name: stored)
    monkeypatch.setitem(sys.modules, "datasets", saved)
    rows_read = list(
        read_rows(["org/name", "org/name:test_sft", write(tmp_path / "a.jsonl", rows[:1]), f"{folder}:test"])
    )
    assert requests == [("org/name", None, "train"), ("org/name", None, "test_sft")]
    assert len(rows_read) == 6
    assert rows_read[3].where == "org/name:test_sft:row 2"
    assert rows_read[3].messages == CHAT["conversations"]
    with pytest.raises(CheckpointError, match=r"org/gone .* cannot be read as a Hugging Face dataset: nobody$"):
        list(read_rows(["org/gone"]))
    with pytest.raises(CheckpointError, match=r"no split train; .* one of val, test"):
        list(read_rows([folder]))
    stored = rows
    assert len(list(read_rows([folder]))) == 2
    parquet, requests[:] = tmp_path / "a:b.parquet", []
    with pytest.raises(CheckpointError, match="No such file"):
        list(read_rows([parquet]))
    parquet.touch()
    assert [row.text for row in read_rows([parquet, "org/name:main:train", "name:train[:10]"])][::2] == ["one"] * 3
    assert requests == [
        ("parquet", None, "train", str(parquet)),
        ("org/name", "main", "train"),
        ("name", None, "train[:10]"),
    ]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CheckpointError, match=r"org/name is not a file; .* pip install datasets"):
        list(read_rows(["org/name"]))
    with pytest.raises(CheckpointError, match=r"a:b.parquet is a parquet file; .* pip install datasets"):
        list(read_rows([parquet]))


# Answers to prompts


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "so ", "completion": "it is"}, "so ⟦it is⟧"),
        ({"instruction": "Sum up.", "input": "a b", "output": "ab"}, "a b Sum up.⟦\nab⟧"),
        ({"instruction": "Sum up.", "input": "", "output": "ab"}, "Sum up.⟦\nab⟧"),
        ({"prompt": "left alone", "text": "all"}, "⟦all⟧"),  # as data sets have it that hold the whole text beside
        ({"instruction": "a", "output": "b", "messages": CHAT["conversations"]}, None),
    ],
)
def test_of_an_answer_to_a_prompt_the_answer_is_learnt(tmp_path, row, shown):
    tokenizer, [document] = tiny_tokenizer(), encode(tmp_path, row)
    if shown is None:
        assert [document] == encode(tmp_path, CHAT)
        return
    assert format_sample(document, tokenizer) == shown
    [prompt] = sample_prompts(read(tmp_path, row), tokenizer, 1, 99, 0)
    assert document.ids[: len(prompt)] == prompt
    assert "text" in row or not any(document.mask[: len(prompt)])


# Prompts


def test_a_prompt_ends_where_the_assistant_begins(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = read(tmp_path, CHAT, {"text": "x" * 300})
    cut = {"text_share": 0.5, "max_text_tokens": 64, "seed": 0}
    decoded = {tokenizer.decode(ids) for ids in sample_prompts(rows, tokenizer, count=9, max_tokens=70, **cut)}
    assert decoded == {"<s><|user|>\nhi\n<|assistant|>\n", "x" * 64}
    assert len(sample_prompts(rows, tokenizer, count=1, max_tokens=70, **cut)) == 1
    assert [len(ids) for ids in sample_prompts(rows, tokenizer, count=9, max_tokens=63, **cut)] == [8]
    assert sorted(len(ids) for ids in sample_prompts(rows, tokenizer, count=9, max_tokens=300, seed=0)) == [8, 300]


@pytest.mark.parametrize(
    "row, begun",
    [
        (SHARED, "<s><|system|>\nbe kind\n<|user|>\nhi\n<|assistant|>\n"),
        ({"turns": ["one", "two"]}, "<s><|user|>\none\n<|assistant|>\n"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, None),
        ({"messages": [{"role": r, "content": r} for r in ("assistant", "user", "assistant")]},
         "<s><|assistant|>\nassistant</s>\n<|user|>\nuser\n<|assistant|>\n"),
        ({"input_ids": [1, 70, 71, 72, 73], "loss_mask": [0, 0, 0, 1, 1]}, [1, 70, 71]),
        ({"input_ids": [1, 70, 71], "loss_mask": [0, 0, 0]}, [1, 70, 71]),
        ({"input_ids": [1, 70, 71, 72], "loss_mask": [0, 1, 1, 1]}, [1, 70]),
        ({"text": "abcdef"}, "abc"),
        ({"text": "a"}, None),
        ({"prompt": "abcdef", "completion": "gh"}, "abcdef"),
        ({"instruction": "ab", "input": "cd", "output": "ef"}, "cd ab"),
        ('"abc"', "abc"),
    ],
)  # fmt: skip
def test_every_kind_of_row_gives_a_prompt(tmp_path, row, begun):
    tokenizer = tiny_tokenizer()
    rows = read(tmp_path, row)
    prompts = sample_prompts(rows, tokenizer, count=9, max_tokens=80, seed=0, text_share=0.5, max_text_tokens=64)
    ids = tokenizer(begun)["input_ids"] if isinstance(begun, str) else begun
    assert prompts == ([] if begun is None else [ids])
