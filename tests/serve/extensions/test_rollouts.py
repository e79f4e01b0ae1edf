"""An operator changes the engine of a running server: who may, what texts are written, and what is refused."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import torch

pytest.importorskip("fastapi")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.engine_in_thread import EngineThread, ServerHere
from helpers.processes import soon
from helpers.serving import listening
from redrafter import Engine, boxed_pair
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.errors import ArgumentError
from redrafter.model.target import Target
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.engine import ServedEngine
from redrafter.serve.engine_process.worker import CHANGES
from redrafter.serve.network.api_keys import OPERATOR_KEY_VARIABLE, ApiKeys, collect_operator_keys
from redrafter.serve.routes.app import server_app
from redrafter.serve.server import load_server

LOAD = LoadOptions(device="cpu", dtype="float32")
OPERATOR = {"Authorization": "Bearer sesame"}
PROMPT = "The old man looked at the sea"
PATHS = ("/v1/sleep", "/v1/wake", "/v1/update_weights", "/v1/drafter")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Other weights of the boxed base, other weights of its drafter, and a drafter that does not fit it."""
    folder = tmp_path_factory.mktemp("folders")
    base = AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in base.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.1)
    base.save_pretrained(folder / "base")
    drafter = open_drafter_model(boxed_pair(), subfolder="drafter")
    with torch.no_grad():
        drafter.lm_head.weight.normal_(0, 0.02)
    drafter.save_pretrained(folder / "drafter")
    drafter.config.base_embedding_norms = [9.0] * 8
    drafter.save_pretrained(folder / "misfit")
    weights = load_file(folder / "base" / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "diverged.safetensors")
    return folder


@contextmanager
def serving() -> Iterator[tuple[ServerHere, httpx.Client]]:
    pair, options = Pair.load(LOAD), ServeOptions()
    engine = ServedEngine.from_pair(pair, options, LOAD)
    thread = EngineThread(engine.scheduler, pair.tokenizer, engine.facts)
    server = load_server(thread, options, LOAD, ApiKeys(), ApiKeys(["sesame"], "operator"))
    server.engine.start()
    try:
        with listening(server_app(server)) as url, httpx.Client(base_url=url, timeout=300) as http:
            here = ServerHere(server, url)
            here.memory = engine.scheduler.memory
            yield here, http
    finally:
        server.engine.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[ServerHere, httpx.Client]]:
    with serving() as here:
        yield here


@pytest.fixture
def served(shared) -> ServerHere:
    """A server whose weights and drafter no test changes."""
    return shared[0]


@pytest.fixture
def http(shared) -> httpx.Client:
    """A client of `served`."""
    return shared[1]


@pytest.fixture
def own() -> Iterator[tuple[ServerHere, httpx.Client]]:
    """A server for one test, which changes it, and a client of it."""
    with serving() as here:
        yield here


def plain_text(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    """What a model alone writes after a prompt, greedily."""
    text = Engine(Target(model), UndraftedProposer()).generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False
    )
    return text[0, len(ids) :].tolist()


def complete(http, count=24, timeout=300, **more):
    body = {"prompt": PROMPT, "max_tokens": count, "temperature": 0} | more
    return http.post("/v1/completions", json=body, timeout=timeout)


def text_of(model, count=24):
    tokenizer = AutoTokenizer.from_pretrained(boxed_pair())
    return tokenizer.decode(plain_text(model, tokenizer(PROMPT).input_ids, count), skip_special_tokens=True)


def operate(http, path, body=None, **more):
    return http.post(path, json={} if body is None else body, headers=OPERATOR, **more)


def test_only_an_operator_may_change_the_engine(http, served):
    for path in PATHS:
        assert http.post(path, json={}).status_code == 401
        assert http.post(path, json={}, headers={"Authorization": "Bearer other"}).status_code == 401
        foreign = OPERATOR | {"Origin": "https://elsewhere.example"}
        assert http.post(path, json={}, headers=foreign).status_code == 403
    assert not served.server.engine.load.asleep


def test_an_operator_key_opens_nothing_else_and_a_client_key_opens_no_change(served):
    keys, operators = ApiKeys(["client"]), ApiKeys(["sesame"], "operator")
    server = type(served.server)(served.server.engine, served.server.tokenizer, keys=keys, operators=operators)
    with listening(server_app(server)) as url, httpx.Client(base_url=url, timeout=300) as http:
        client = {"Authorization": "Bearer client"}
        answer = http.post("/v1/sleep", json={}, headers=client)
        assert (answer.status_code, "operator's key" in answer.text) == (403, True)
        assert http.get("/v1/models", headers=OPERATOR).status_code == 401
        assert http.get("/v1/models", headers=client).status_code == 200
        assert http.get("/v1/drafter", headers=OPERATOR).json()["drafter_number"] == 0


def test_a_server_without_an_operator_key_says_what_to_type(served):
    server = type(served.server)(served.server.engine, served.server.tokenizer)
    with listening(server_app(server)) as url:
        for path in PATHS:
            answer = httpx.post(url + path, json={}, headers=OPERATOR)
            assert answer.status_code == 404
            assert "--operator-key KEY, or REDRAFTER_OPERATOR_KEY" in answer.json()["error"]["message"]
            assert httpx.post(f"{url}{path}%0a", json={}).status_code == 400
    assert not served.server.engine.load.asleep


def test_operators_have_keys_of_their_own(monkeypatch):
    monkeypatch.setenv(OPERATOR_KEY_VARIABLE, "secret")
    assert collect_operator_keys(["more"], ApiKeys(["other"])).client(b"Bearer secret") == "operator-2"
    with pytest.raises(ArgumentError, match="is an API key too"):
        collect_operator_keys([], ApiKeys(["secret"]))
    with pytest.raises(ArgumentError, match="printable"):
        collect_operator_keys(["a b "], ApiKeys())


def stream(url, count, started: threading.Event, parts: list, **more) -> None:
    """Read the token ids of a stream; set `started` when the first have come."""
    body = {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "stream": True, "ignore_eos": True} | more
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and not line.endswith("[DONE]"):
                parts.append(httpx.Response(200, text=line[6:]).json()["choices"][0]["text"])
                started.set()


@pytest.mark.variant
def test_a_stream_continues_through_new_weights_and_later_texts_are_those_of_the_new_model(own, folders):
    """The stream's first part is the old model's text, and the rest is what the new one writes after that part."""
    served, http = own
    before = complete(http).json()["choices"][0]["text"]
    complete(http, prompt=PROMPT * 6)
    started, parts = threading.Event(), []
    ids = served.server.tokenizer(PROMPT).input_ids
    worker = threading.Thread(target=stream, args=(served.url, 220, started, parts))
    worker.start()
    assert started.wait(60)
    assert operate(http, "/v1/update_weights", {"path": str(folders / "base")}).status_code == 200
    worker.join(300)
    text = "".join(parts)
    old = AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32)
    new = AutoModelForCausalLM.from_pretrained(folders / "base", dtype=torch.float32)
    expected = text_of(new)
    assert expected != before
    for how in ({}, {"speculate": False}):
        assert complete(http, **how).json()["choices"][0]["text"] == expected
    usage = complete(http, prompt=PROMPT * 6).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "nothing of it was read by the new model"
    old.generation_config.eos_token_id = new.generation_config.eos_token_id = None
    tokens, decode = plain_text(old, ids, 220), served.server.tokenizer.decode
    assert text != decode(tokens, skip_special_tokens=True), "the update came too late to be seen"
    # Where the texts part, some step was the new model's first one.
    for shared in range(len(tokens)):
        if not text.startswith(decode(tokens[: shared + 1], skip_special_tokens=True)):
            break
    candidates = (
        tokens[:n] + plain_text(new, [*ids, *tokens[:n]], 220 - n) for n in range(shared, max(shared - 40, 0), -1)
    )
    assert any(decode(each, skip_special_tokens=True) == text for each in candidates)
    diverged = {"path": str(folders / "diverged.safetensors"), "allow_not_finite": True}
    assert operate(http, "/v1/update_weights", diverged).json()["not_finite"] == ["model.norm.weight"]
    assert complete(http).status_code == 500


@pytest.mark.variant
def test_a_drafter_is_swapped_under_streams_without_a_changed_text(own, folders):
    served, http = own
    expected = text_of(AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32), 160)
    whole: list[list[str]] = [[], [], []]
    workers = []
    for parts in whole:
        started = threading.Event()
        workers.append(
            threading.Thread(target=stream, args=(served.url, 160, started, parts), kwargs={"ignore_eos": False})
        )
        workers[-1].start()
        assert started.wait(60)
    first = operate(http, "/v1/drafter", {"path": str(folders / "drafter")}).json()
    assert first == {
        "asleep": False,
        "drafter": str(folders / "drafter"),
        "previous_drafter": None,
        "drafter_number": 1,
        "not_finite": [],
    }
    complete(http, 40)
    back = operate(http, "/v1/drafter", {"previous": True}).json()
    assert (back["drafter"], back["previous_drafter"], back["drafter_number"]) == (None, str(folders / "drafter"), 2)
    for worker in workers:
        worker.join(300)
    assert ["".join(parts) for parts in whole] == [expected] * 3
    complete(http, 40)
    metrics = http.get("/metrics").text
    share = {}
    for number in ("0", "1", "2"):
        label = f'{{drafter="{number}",model_name="boxed"}} '
        accepted, drafted = (
            float(metrics.split(f"redrafter:drafter_num_{name}_tokens_total{label}")[1].split()[0])
            for name in ("accepted", "draft")
        )
        share[number] = accepted / drafted
    assert share["1"] < min(share["0"], share["2"]), "a head of noise is right less often"
    assert 'redrafter:drafter_changes_total{model_name="boxed"} 2.0' in metrics


def test_what_does_not_fit_is_refused_by_name_and_texts_go_on(http, folders, tmp_path):
    before = complete(http).json()["choices"][0]["text"]
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    diverged = {"path": str(folders / "diverged.safetensors")}
    cases = [
        ("/v1/drafter", {"path": str(folders / "misfit")}, 400, "made for another base"),
        ("/v1/drafter", {"path": str(folders / "base")}, 400, ""),
        ("/v1/drafter", {"path": "/nowhere"}, 404, "no directory"),
        ("/v1/drafter", {"path": "a/hub-name"}, 404, "no directory"),
        ("/v1/drafter", {"path": "a\0b"}, 404, "no directory"),
        ("/v1/drafter", {"previous": True}, 400, "no previous drafter"),
        ("/v1/drafter", {"path": "x", "previous": True}, 400, "not both"),
        ("/v1/drafter", {}, 400, "give a path"),
        ("/v1/drafter", {"path": "x", "force": True}, 400, "force is not supported"),
        ("/v1/update_weights", {"path": str(tmp_path)}, 400, "cannot be read"),
        ("/v1/update_weights", {"path": str(folders / "drafter")}, 400, "drafter"),
        ("/v1/update_weights", diverged, 400, "such as model.norm.weight"),
        ("/v1/update_weights", {}, 400, "path"),
        ("/v1/sleep", {"level": 2}, 400, "level is not supported"),
    ]
    for path, body, status, told in cases:
        answer = operate(http, path, body)
        assert (answer.status_code, told in answer.text) == (status, True), (path, body, answer.text)
    assert complete(http).json()["choices"][0]["text"] == before


@pytest.mark.variant
def test_files_that_are_no_regular_ones_or_are_cut_short_stop_nobody(http, served, tmp_path):
    """Each was read while Python's lock was held, or stayed mapped: one stopped the engine, and the other ended it."""
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "model.safetensors")
    shutil.copytree(boxed_pair(), tmp_path / "cut")
    for file in (tmp_path / "cut").rglob("model.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    shutil.copytree(boxed_pair() / "drafter", tmp_path / "drafter", ignore=lambda *_: ["model.safetensors"])
    os.mkfifo(tmp_path / "drafter" / "model.safetensors")
    cases = [
        ("/v1/update_weights", "pipe", "model.safetensors cannot be read: it is not a regular file"),
        ("/v1/update_weights", "cut", "model.safetensors cannot be read: it is cut short"),
        ("/v1/drafter", "drafter", "model.safetensors cannot be read: it is not a regular file"),
        ("/v1/drafter", "cut/drafter", "model.safetensors cannot be read: it is cut short"),
    ]
    before = complete(http).json()["choices"][0]["text"]
    started, parts = threading.Event(), []
    worker = threading.Thread(target=stream, args=(served.url, 200, started, parts))
    worker.start()
    assert started.wait(60)
    for path, folder, told in cases:
        answer = operate(http, path, {"path": str(tmp_path / folder)}, timeout=60)
        assert (answer.status_code, told in answer.text) == (400, True), (path, folder, answer.text)
    worker.join(120)
    assert parts
    assert not worker.is_alive()
    assert complete(http).json()["choices"][0]["text"] == before


def test_an_error_that_nobody_expected_in_a_change_is_told_without_its_text(http, served, folders, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid argument, at 0x7f00")

    for kind in ("update_weights", "change_drafter"):
        monkeypatch.setitem(CHANGES, kind, fail)
    for path in ("/v1/update_weights", "/v1/drafter"):
        answer = operate(http, path, {"path": str(folders / "base")})
        assert (answer.status_code, "CUDA" in answer.text, "log" in answer.text) == (500, False, True)
    assert complete(http).status_code == 200


@pytest.mark.variant
def test_a_server_that_sleeps_refuses_what_comes_and_what_runs_goes_on_when_it_wakes(http, served):
    expected = text_of(AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32), 160)
    started, parts = threading.Event(), []
    worker = threading.Thread(target=stream, args=(served.url, 160, started, parts), kwargs={"ignore_eos": False})
    worker.start()
    assert started.wait(60)
    assert operate(http, "/v1/sleep").json()["asleep"] is True
    so_far = len(parts)
    answer = complete(http, timeout=30)  # one that is taken waits until the engine wakes
    assert (answer.status_code, "POST /v1/wake" in answer.text) == (503, True)
    assert answer.headers["Retry-After"]
    assert http.get("/v1/health/ready").status_code == 503
    assert http.get("/v1/health/live").status_code == 200
    assert 'redrafter:asleep{model_name="boxed"} 1.0' in http.get("/metrics").text
    refused = operate(http, "/v1/drafter", {"previous": True})
    assert (refused.status_code, "wake it first" in refused.text) == (400, True)
    assert worker.is_alive()
    assert len(parts) <= so_far + 1
    assert operate(http, "/v1/wake").json()["asleep"] is False
    worker.join(300)
    assert "".join(parts) == expected
    assert complete(http, 160).json()["choices"][0]["text"] == expected


def test_memory_is_given_back_while_the_server_sleeps_and_clients_may_leave(http, served):
    pools = served.memory.tensors
    assert all(pool.untyped_storage().nbytes() for pool in pools)
    started, left = threading.Event(), threading.Event()

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=300) as client:
            body = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    started.set()
                    break
                await asyncio.to_thread(left.wait)

    worker = threading.Thread(target=lambda: asyncio.run(leave()))
    worker.start()
    assert started.wait(60)
    operate(http, "/v1/sleep")
    assert not any(pool.untyped_storage().nbytes() for pool in pools)
    left.set()
    worker.join(60)
    assert soon(lambda: not served.server.engine.streams)
    operate(http, "/v1/wake")
    assert all(pool.untyped_storage().nbytes() for pool in pools)
    assert complete(http).status_code == 200
    assert served.server.engine.idle
