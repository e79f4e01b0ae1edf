"""Training data: formats of rows, tokens that are learnt, prompts, and batches of windows."""

import json
import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from helpers.chats import CHAT, FORGETFUL, LLAMA_LIKE, tiny_tokenizer, write
from redrafter.data.documents import encode_documents, format_sample
from redrafter.data.prompts import sample_prompts
from redrafter.data.rows import Row, fingerprint, read_rows
from redrafter.data.windows import Batch, Document, Windows
from redrafter.errors import CheckpointError, MismatchError
from redrafter.train.loss import target_mask

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


def random_documents(count: int, longest: int, seed: int = 0) -> list[Document]:
    """Return documents that begin with their own number and have random loss masks."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for number in range(count):
        size = int(torch.randint(4, longest + 1, (1,), generator=generator))
        mask = (torch.rand(size, generator=generator) < 0.8).tolist()
        documents.append(Document([number, *range(1000, 999 + size)], [*mask[:-2], True, True]))
    return documents


def windows_in(batch: Batch) -> list[list[int]]:
    """Return the windows of a batch, split by their segments."""
    rows = zip(batch.tokens.tolist(), batch.segment.tolist(), strict=True)
    windows = [
        [t for t, s in zip(tokens, segments, strict=True) if s == k] for tokens, segments in rows for k in range(99)
    ]
    return [window for window in windows if window and any(window)]


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
        ({"turns": ["a\ud800b"]}, "surrogate"),
        ({"text": "a"}, "too short"),
        ({"text": "abc", "split": "dev"}, "split"),
        ({"text": "abc", "tokenizer": 5}, '"tokenizer" must be a string'),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant turn"),
        ({"messages": []}, "no assistant turn"),
        ({"turns": ["hi", "there"]}, "no assistant turn"),
        ({"turns": ["hi", 4]}, '"content"'),
        ({"messages": [{"role": "user"}]}, '"content"'),
        ({"messages": "hello"}, '"role"'),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "tool", "value": "y"}]}, "found 'tool'"),
        ({"conversations": [{"from": "human"}]}, '"content"'),
        ({"input_ids": [1, 2, 3]}, '"loss_mask"'),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 1]}, '"loss_mask"'),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, '"loss_mask"'),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1.0, 1]}, '"loss_mask"'),
        ({"input_ids": [1, -2, 3], "loss_mask": [1, 1, 1]}, '"input_ids"'),
        ({"input_ids": [1, 2**31, 3], "loss_mask": [1, 1, 1]}, '"input_ids"'),
        ({"input_ids": [1, True, 3], "loss_mask": [1, 1, 1]}, '"input_ids"'),
        ({"input_ids": [300, 301], "loss_mask": [0, 0]}, "mask is empty"),
        ({"prompt": "so"}, "a prompt without an answer, so there is nothing to learn"),
        ('"so"', "a prompt without an answer"),
        ({"instruction": "so"}, "a prompt without an answer"),
        ({"prompt": "so", "completion": 7}, '"completion" must be a string'),
        ({"prompt": ["so"], "completion": "it"}, '"prompt" must be a string'),
        ({"prompt": "", "completion": "it"}, "the prompt is empty"),
        ({"completion": "it"}, "a row has one of text, .* prompt, instruction; found {'completion'"),
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
        (None, "has no chat template: set tokenizer.chat_template, or use rows of text"),
        ("{{ nobody() }}", "template fails"),
        (LLAMA_LIKE.replace("{{ '<|assistant|>\n' }}", "Answer:"), "does not write"),
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

    def load_dataset(name: str, config: str | None = None, *, split: str, **files: str) -> list[object]:
        requests.append((name, config, split, *files.values()))
        if name == "org/gone":
            raise FileNotFoundError("nobody\nhas it")
        return rows

    stored: object = {"val": rows, "test": rows[:1]}
    saved = SimpleNamespace(load_dataset=load_dataset, load_from_disk=lambda name: stored)
    monkeypatch.setitem(sys.modules, "datasets", saved)
    rows_read = list(
        read_rows(["org/name", "org/name:test_sft", write(tmp_path / "a.jsonl", rows[:1]), f"{tmp_path}:test"])
    )
    assert requests == [("org/name", None, "train"), ("org/name", None, "test_sft")]
    assert len(rows_read) == 6
    assert rows_read[3].where == "org/name:test_sft:row 2"
    assert rows_read[3].messages == CHAT["conversations"]
    with pytest.raises(CheckpointError, match=r"org/gone .* cannot be read as a Hugging Face dataset: nobody$"):
        list(read_rows(["org/gone"]))
    with pytest.raises(CheckpointError, match=r"no split train; .* one of val, test"):
        list(read_rows([tmp_path]))
    stored = rows
    assert len(list(read_rows([tmp_path]))) == 2
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
        ({"prompt": "so ", "response": "it is", "source": "x"}, "so ⟦it is⟧"),
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
        ({"text": ""}, None),
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


# Windows and batches


def test_long_documents_are_cut_and_open_as_every_prompt_does():
    text = Document([1, *range(10, 33)], [True] * 24)
    windows = Windows([text, Document([40, 41, 42], [True] * 3)], length=10, bos=1, pack=False)
    in_order = [windows_in(batch)[0] for batch in islice(windows.batches(1, 0), 4)]
    assert sorted(in_order) == [[1, *range(10, 19)], [1, *range(19, 28)], [1, *range(28, 33)], [40, 41, 42]]
    assert windows.count_ids(50)[10:33].tolist() == [1] * 23
    assert windows.count_ids(50)[[1, 40, 41]].tolist() == [0, 0, 1]  # nothing draws a first token
    silent = Document(list(range(30)), [False] * 10 + [True] * 5 + [False] * 15)
    assert len(Windows([silent], length=10)) == 1  # two windows teach nothing
    assert len(Windows([], length=10)) == len(Windows([], length=10, pack=False)) == 0


@pytest.mark.parametrize("pack", [True, False])
def test_batches_hold_documents_side_by_side_and_nothing_else(pack):
    originals = random_documents(60, longest=40)
    windows = Windows(originals, length=40, pack=pack)
    seen = []
    for batch in islice(windows.batches(4, 0), windows.steps_per_epoch(4)):
        assert batch.tokens.dtype == batch.segment.dtype == torch.int64
        assert batch.mask.dtype == torch.bool
        assert batch.tokens.shape == batch.mask.shape == batch.segment.shape
        assert not pack or batch.tokens.shape == (4, 40)
        for tokens, mask, segment in zip(*batch, strict=True):
            assert segment[0] == 0
            assert set(segment.diff().tolist()) <= {0, 1}
            for k in range(int(segment[-1]) + 1):
                ids, learnt = tokens[segment == k].tolist(), mask[segment == k].tolist()
                if ids[1:2] == [1000]:
                    assert ids == originals[ids[0]].ids
                    assert learnt == [False, *originals[ids[0]].mask[1:]]
                    seen.append(ids[0])
                else:  # padding, which only ends a row
                    assert k == segment[-1]
                    assert not any(ids)
                    assert not any(learnt)
            assert pack or segment.max() <= 1
    assert set(seen) == set(range(60))
    assert len(seen) < 60 + 4 * 8


def test_no_rollout_crosses_from_a_document_into_another():
    batch = next(Windows(random_documents(80, longest=20), length=64).batches(8, 0))
    counted = target_mask(batch.mask, 4)
    assert batch.segment.max() > 3
    assert counted.any(dim=(0, 1)).all()
    for row, anchor, k in counted.nonzero().tolist():
        assert len(set(batch.segment[row, anchor : anchor + k + 3].tolist())) == 1
    everywhere = target_mask(batch.segment < batch.segment.max(), 4)  # as a mask without those 0s would have it
    assert any(batch.segment[r, a] != batch.segment[r, a + k + 2] for r, a, k in everywhere.nonzero().tolist())


@pytest.mark.parametrize(("count", "pack", "least"), [(2000, True, 0.98), (400, False, 0.9)])
def test_short_documents_leave_little_padding(count, pack, least):
    windows = Windows(random_documents(count, longest=100), length=256, pack=pack)
    batches = list(islice(windows.batches(4, 0), windows.steps_per_epoch(4)))
    tokens = sum(batch.tokens.numel() for batch in batches)
    assert sum(int((batch.tokens > 0).sum()) for batch in batches) / tokens > least
    widths = [batch.tokens.shape[1] for batch in batches[:32]]
    assert pack or widths != sorted(widths)  # rows of a batch are alike in length, but short and long batches in turn


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_sees_every_window_once_in_a_seeded_order(pack):
    windows = Windows([Document([n + 3] * (5 + n % 9), [True] * (5 + n % 9)) for n in range(24)], 19, pack=pack)

    def epoch(seed: int, process: int = 0, processes: int = 1, size: int = 2, number: int = 0) -> list[int]:
        steps = windows.steps_per_epoch(size, processes)
        batches = windows.batches(size, seed, process, processes, start=steps * number)
        return [ids[0] - 3 for batch in islice(batches, steps) for ids in windows_in(batch)]

    assert windows.row_widths.numel() % 4 == 0  # or a few would come twice
    assert sorted(epoch(0)) == list(range(24))
    assert epoch(0) == epoch(0)
    assert len({tuple(epoch(seed, number=number)) for seed in (0, 1) for number in (0, 1)}) == 4
    assert sorted(epoch(0, 0, 2) + epoch(0, 1, 2)) == list(range(24))
    assert windows.steps_per_epoch(2, 2) > 1
    if pack:  # who shares a row changes from epoch to epoch, and which rows share a batch
        first, second = (list(islice(windows.batches(2, seed), 6)) for seed in (0, 1))
        assert {str(row) for batch in first for row in batch.tokens} != {str(row) for b in second for row in b.tokens}
        first, second = ({str(batch.segment.sort(0).values) for batch in sequence} for sequence in (first, second))
        assert first != second
    batch = next(Windows([Document([5] * 4, [True] * 4)], 9, pack=pack).batches(3, 0))
    assert batch.tokens.shape == (3, 9 if pack else 4)  # fewer windows than a batch: they repeat


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_any_number_of_processes_shares_the_batches_of_four_from_any_of_them_on(processes, pack):
    windows = Windows(random_documents(70, longest=40), length=64, pack=pack)
    if pack:
        assert windows.steps_per_epoch(3, 1) == 9, "else four processes share an epoch without filling it up"
        assert windows.steps_per_epoch(3, 4) == 3, "else eight processes begin each epoch alike"
    whole = [next(islice(windows.batches(3, 7, number % 4, 4), number // 4, None)) for number in range(96)]
    for process in range(processes):
        of_process = whole[process::processes]
        for start in (0, 1, 2, 5, 10):
            drawn = windows.batches(3, 7, process, processes, start, multiple=4)
            for mine, expected in zip(drawn, of_process[start:], strict=False):
                assert all(map(torch.equal, mine, expected))
