"""LoRA adapters of a server: each is a model of its own, and clients may load more where the server lets them."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache

import httpx
import pytest
import torch

pytest.importorskip("fastapi")

from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.adapters import adapted, peft, randomized, saved
from helpers.engine_in_thread import OPENAI_DEFAULTS, ServerHere, serving
from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.scheduling import scheduler
from helpers.serving import listening
from redrafter import boxed_pair
from redrafter.app.options import LoadOptions
from redrafter.errors import ArgumentError
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.request import RequestBounds
from redrafter.scheduler.sequence import TokenSequence
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.messages import Submit
from redrafter.serve.engine_process.start import EngineFacts
from redrafter.serve.engine_process.worker import Worker
from redrafter.serve.protocol.requests import CompletionRequest
from redrafter.serve.routes.app import create_app
from redrafter.serve.server import Server

LONG = "The old man looked at the sea and the sea looked at the old man, and neither of the two said a word."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directories of adapters of the boxed base, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {name: folder / name for name in ("one", "two", "three")}
    model = adapted(model=AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32), lora_alpha=2)
    for seed, path in enumerate(found.values()):
        randomized(model, seed).save_pretrained(path)
    return found


@pytest.fixture(scope="module")
def program(folders) -> Iterator[ServerHere]:
    modules = f"one={folders['one']}", f"two={folders['two']}"
    load = LoadOptions(dtype="float32", max_loras=3, device="cpu")
    with serving(load, lora_modules=modules, allow_runtime_lora_updating=True) as server:
        yield server


@pytest.fixture(scope="module")
def http(program) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=program.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folders):
    """Return what PEFT's model of an adapter, or the model alone, writes after a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(boxed_pair())
    base = AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folders["one"], adapter_name="one").eval()
    for name in ("two", "three"):
        model.load_adapter(folders[name], name)

    @cache
    def write(name: str | None, prompt: str) -> str:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        model.set_adapter(name or "one")
        with nullcontext() if name else model.disable_adapter():
            text = model.generate(input_ids=ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(text, skip_special_tokens=True)

    return write


def complete(http, model, prompt="Once upon a time", **more):
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0} | ({"model": model} if model else {}) | more
    return http.post("/v1/completions", json=body)


@pytest.mark.parametrize("name", ["one", "two", None])
def test_an_adapter_is_a_model_of_its_own(http, expected, name):
    answer = complete(http, name).json()
    assert answer["choices"][0]["text"] == expected(name, "Once upon a time")
    assert answer["model"] == (name or "boxed")


def test_models_and_their_parents_are_listed_and_another_name_is_refused(http):
    entries = http.get("/v1/models").json()["data"]
    found = [(entry["id"], entry["parent"]) for entry in entries]
    assert found == [("boxed", None), ("one", "boxed"), ("two", "boxed")]
    assert http.get("/v1/models/two").json() == entries[2]
    answer = complete(http, "four")
    assert answer.status_code == 404
    assert "'boxed' is, and so are its adapters 'one', 'two'" in answer.json()["error"]["message"]


@pytest.mark.variant
def test_a_prefix_is_reused_by_its_own_adapter_alone(http, expected):
    for name, cached in ((None, False), ("one", False), ("two", False), ("one", True), (None, True)):
        answer = complete(http, name, LONG).json()
        assert answer["choices"][0]["text"] == expected(name, LONG)
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached


def test_a_stream_and_a_chat_and_a_response_have_adapters_too(http):
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    settings = {"max_tokens": 12, "temperature": 0}
    texts = {}
    for name in ("boxed", "one"):
        chat = http.post("/v1/chat/completions", json={"model": name, "messages": messages, **settings}).json()
        assert chat["model"] == name
        body = {"model": name, "input": messages[0]["content"], "max_output_tokens": 12, "temperature": 0}
        response = http.post("/v1/responses", json=body).json()
        assert response["model"] == name
        texts[name] = chat["choices"][0]["message"]["content"]
        assert response["output"][0]["content"][0]["text"] == texts[name]
    assert texts["boxed"] != texts["one"]
    assert '"model":"one"' in complete(http, "one", stream=True).text


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(http, expected, folders):
    body = {"lora_name": "three", "lora_path": str(folders["three"])}
    answer = http.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'three' added successfully.")
    assert complete(http, "three").json()["choices"][0]["text"] == expected("three", "Once upon a time")
    for name, says in ("three", "The lora adapter 'three' has already been loaded."), ("four", "--max-loras"):
        again = http.post("/v1/load_lora_adapter", json=body | {"lora_name": name})  # there is no room for a fourth
        assert again.status_code == 400
        assert says in again.json()["error"]["message"]
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "three"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'three' removed successfully.")
    assert complete(http, "three").status_code == 404
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "three"}).status_code == 404


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        ("load", {"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (
            "load",
            {"lora_name": "x", "lora_path": "/nowhere"},
            404,
            "No adapter found for '/nowhere': the server's log has the reason",
        ),
        ("load", {"lora_name": "boxed", "lora_path": "/"}, 400, "has already been loaded"),
        ("unload", {"lora_name": "x"}, 404, "The lora adapter 'x' cannot be found."),
    ],
)
def test_what_cannot_be_loaded_is_refused_as_vllm_does(http, route, body, status, message):
    answer = http.post(f"/v1/{route}_lora_adapter", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_a_server_that_does_not_allow_it_loads_nothing(program, folders):
    body = {"lora_name": "three", "lora_path": str(folders["three"])}
    with listening(create_app(program.server)) as url:
        answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=300)
    assert answer.status_code == 404
    assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]


def test_an_adapter_that_is_unloaded_while_its_prompt_is_read_is_not_served_as_the_model():
    asked = []

    class Engine:
        facts = EngineFacts(
            "m",
            (),
            RequestBounds(97, 96, draft_depth=3),
            frozenset(),
            OPENAI_DEFAULTS,
            True,
            adapters={"one": "somewhere"},
        )

        def deltas(self, request, sequences):
            asked.append(request.adapter)
            raise ArgumentError("no adapter 'one' is loaded")

    service = Server(Engine(), AutoTokenizer.from_pretrained(boxed_pair()))
    read = service.prompts.encode_prompts
    service.prompts.encode_prompts = lambda *asked: service.adapters.clear() or read(*asked)
    with pytest.raises(ArgumentError):
        asyncio.run(service.completion(CompletionRequest(model="one", prompt=[5, 6]), {}))
    assert asked == ["one"]


def test_modules_that_are_misspelt_or_of_one_name_are_refused():
    for word in "one", "=x", "one=":
        with pytest.raises(ArgumentError, match="--lora-modules are name=path"):
            ServeOptions(lora_modules=(word,))
    with pytest.raises(ArgumentError, match="names 'one' twice"):
        ServeOptions(lora_modules=("one=a", "one=b"))


@pytest.fixture
def worker(tmp_path) -> Iterator[Worker]:
    """A worker that nobody runs, with room for one adapter, "one"; in the end there is room for another."""
    engine = with_tree(tiny_model("llama"), tiny_drafter(), 2, 2)
    engine.options = replace(engine.options, max_loras=1)
    _, folder = saved(tmp_path / "one")
    engine.load_adapter("one", folder)
    worker = Worker(scheduler(engine), lambda written: None, lambda: None)
    yield worker
    worker.scheduler.cancel_all()
    while not worker.scheduler.idle:
        worker.scheduler.round()
    with suppress(ArgumentError):
        engine.unload_adapter("one")
    engine.load_adapter("two", folder)


TEXTS = Submit(([5, 6], [7, 8]), 4, SamplingParams(temperature=0), adapter="one", numbers=(0, 1))


def test_an_adapter_that_is_unloaded_between_two_texts_of_a_request_is_held_for_both(worker, monkeypatch):
    slots = worker.scheduler.engine.target.adapters
    hold = slots.hold
    monkeypatch.setattr(slots, "hold", lambda *given: (hold(*given), slots.unload("one"))[0])
    worker.submit(TEXTS, None)
    assert worker.scheduler.running_set.waiting == 2


def test_a_request_whose_texts_cannot_be_made_holds_no_adapter(worker, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(TokenSequence, "__post_init__", lambda sequence: 1 / 0)
        worker.submit(TEXTS, None)
