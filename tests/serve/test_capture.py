"""Served texts as rows of training data: what is written, who may read it, and what is lost when."""

import json
import stat
import time

import httpx
import pytest

pytest.importorskip("fastapi")

from transformers import AutoTokenizer

from helpers.engine_in_thread import client_of
from helpers.serving import listening
from redrafter import boxed_pair
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.data.rows import fingerprint, read_rows
from redrafter.errors import ArgumentError
from redrafter.scheduler.sequence import SequenceDelta, Stats
from redrafter.serve import capture as capture_module
from redrafter.serve.capture import Capture, prepare_folder
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.client import ServedSequence
from redrafter.serve.engine_process.engine import ServedEngine
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.routes.app import server_app
from redrafter.serve.server import Server


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(boxed_pair())


def record(capture: Capture, prompt, tokens, finish="length", adapter=None) -> None:
    """Let a text be written in two deltas."""
    sequence = ServedSequence(prompt, frozenset(), Stats(), adapter=adapter, recorded=[])
    capture.observe(sequence, SequenceDelta(tokens[:1]))
    capture.observe(sequence, SequenceDelta(tokens[1:], finish=finish))


def rows_of(folder) -> list:
    return list(read_rows([folder]))


def until(true, seconds=120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_rows_hold_what_was_asked_and_answered_and_nothing_else(tmp_path, tokenizer):
    folder = tmp_path / "texts"
    capture = Capture(ServeOptions(capture=str(folder)), tokenizer)
    record(capture, [5, 6], [7, 8, 9], "stop")
    record(capture, (5,), [7, 8], "length", adapter="poems")
    for finish in ("cancelled", "error"):
        record(capture, [1], [2, 3, 4], finish)
    record(capture, [1], [2])
    capture.close()
    [file] = folder.iterdir()
    assert (mode(folder), mode(file), file.suffix) == (0o700, 0o600, ".jsonl")
    first, second = map(json.loads, file.read_text().splitlines())
    assert first == {
        "input_ids": [5, 6, 7, 8, 9],
        "loss_mask": [0, 0, 1, 1, 1],
        "tokenizer": fingerprint(tokenizer),
        "source": "model",
    }
    assert second["source"] == "poems"
    assert [row.ids for row in rows_of(folder)] == [[5, 6, 7, 8, 9], [5, 7, 8]]
    assert capture.rows == 2


def test_files_are_rotated_and_the_oldest_are_dropped(tmp_path, tokenizer):
    most = 1 << 16
    capture = Capture(ServeOptions(capture=str(tmp_path / "texts"), capture_max_bytes=most), tokenizer)
    for number in range(400):
        record(capture, [number], list(range(60)))
    record(capture, [1], list(range(5000)))  # larger than a file
    capture.close()
    assert (capture.rows, capture.lost) == (400, 1)
    files = sorted((tmp_path / "texts").iterdir())
    assert len(files) > 8
    assert sum(file.stat().st_size for file in files) <= most
    numbers = [row.ids[0] for row in rows_of(tmp_path / "texts")]
    assert numbers == list(range(numbers[0], 400))
    assert numbers[0] > 0
    assert all(row.ids[1:] == list(range(60)) for row in rows_of(tmp_path / "texts"))


def test_a_file_is_written_once_its_first_row_is_old(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(capture_module, "FILE_SECONDS", 0.0)
    monkeypatch.setattr(capture_module, "POLL_SECONDS", 0.05)
    capture = Capture(ServeOptions(capture=str(tmp_path / "texts")), tokenizer)
    record(capture, [1], [2, 3])
    until(lambda: capture.rows == 1)
    assert [row.ids for row in rows_of(tmp_path / "texts")] == [[1, 2, 3]]
    capture.close()


def test_a_directory_that_others_may_enter_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ArgumentError, match="chmod 700"):
        prepare_folder(str(folder))
    (tmp_path / "file").touch()
    for name in ("file", "file/below", "a\0b"):
        with pytest.raises(ArgumentError, match="cannot be written to"):
            prepare_folder(str(tmp_path / name))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"capture_except": ("key-1",)}, "--capture DIR"),
        ({"capture": "x", "capture_except": ("secret",)}, "by their numbers"),
        ({"capture": "x", "capture_max_bytes": 10}, "--capture-max-bytes must be from"),
    ],
)
def test_options_that_say_nothing_are_refused(options, told):
    with pytest.raises(ArgumentError, match=told):
        ServeOptions(**options)


def test_rows_that_cannot_be_written_are_counted_with_one_warning(tmp_path, tokenizer, caplog, monkeypatch):
    """Remove the directory, as an example of an error of the disk."""
    monkeypatch.setattr(capture_module, "FILE_SECONDS", 0.0)
    monkeypatch.setattr(capture_module, "POLL_SECONDS", 0.01)
    folder = tmp_path / "texts"
    capture = Capture(ServeOptions(capture=str(folder)), tokenizer)
    folder.rmdir()
    with caplog.at_level("WARNING", "redrafter"):
        for number in range(1, 4):
            record(capture, [1], [2, 3])
            until(lambda number=number: capture.lost == number)
    assert len([entry for entry in caplog.records if "cannot be captured" in entry.getMessage()]) == 1
    folder.mkdir(mode=0o700)
    record(capture, [1], [4, 5])
    until(lambda: capture.rows == 1)
    capture.close()
    assert [row.ids for row in rows_of(folder)] == [[1, 4, 5]]


def test_a_server_captures_the_tokens_of_its_texts_but_for_keys_left_out(tmp_path):
    load = LoadOptions(device="cpu")
    pair, options = Pair.load(load), ServeOptions(capture=str(tmp_path / "texts"), capture_except=("key-2",))
    engine = ServedEngine.from_pair(pair, options, load)
    server = Server(client_of(engine.scheduler, pair.tokenizer, engine.facts), pair.tokenizer, options, ApiKeys("ab"))
    server.engine.start()
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 12, "stream": True}
    with listening(server_app(server)) as url, httpx.Client(base_url=url, timeout=300) as http:
        mine, theirs = ({"Authorization": f"Bearer {key}"} for key in "ab")
        answer = http.post("/v1/completions", json=body | {"n": 2}, headers=mine).json()
        http.post("/v1/completions", json=body | {"prompt": "A secret"}, headers=theirs)
        http.post("/v1/chat/completions", json=chat, headers=mine)
        server.capture.close()
        metrics = http.get("/metrics", headers=mine).text
    assert 'redrafter:captured_texts_total{model_name="boxed"} 3.0' in metrics
    assert 'redrafter:lost_captures_total{model_name="boxed"} 0.0' in metrics
    assert any("all clients but key-2" in line for line in server.summary(url))
    server.close()
    first, second, third = rows_of(tmp_path / "texts")
    prompt = pair.tokenizer(body["prompt"]).input_ids
    for row, choice in zip((first, second), answer["choices"], strict=True):
        assert row.ids[: len(prompt)] == prompt
        assert pair.tokenizer.decode(row.ids[len(prompt) :], skip_special_tokens=True) == choice["text"]
        assert row.loss_mask == [False] * len(prompt) + [True] * (len(row.ids) - len(prompt))
    assert "Hello." in pair.tokenizer.decode(third.ids)
    assert not any("secret" in pair.tokenizer.decode(row.ids) for row in (first, second, third))
