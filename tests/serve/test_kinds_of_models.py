"""Servers of other kinds of models: EAGLE-3, recurrent states, FP8 weights, a cache on the host, and no numbers."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from helpers.eagle import random_head, speculators_dir
from helpers.engine_in_thread import client_of, server_of, serving, written
from helpers.models import tiny_model, with_spread_weights
from helpers.recurrent import recurrent_model
from helpers.scheduling import alone, make_sequence, nothing_is_held
from helpers.serving import PROMPTS, offline, text_of
from redrafter import DraftTarget
from redrafter.app.loading import Pair
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.cli import main
from redrafter.errors import UnsupportedError
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.waiting_queue import Limits
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import LoadEngine
from redrafter.serve.engine_process.warm_up import warm_up


@pytest.fixture(scope="module")
def served(pair, tmp_path_factory):
    """A server of the boxed base with a head that was converted."""
    place, base = tmp_path_factory.mktemp("heads"), pair[0].model.config
    head = random_head(vocab_size=base.vocab_size, hidden_size=base.hidden_size, target_layers=None)
    source = speculators_dir(place / "theirs", head)
    words = ["convert", "--drafter-model-dir", str(source), "--to", "drafter", "--output-dir", f"{place}/ours"]
    assert main(words) == 0
    load = LoadOptions(drafter=f"{place}/ours", num_beams=3, draft_len_per_beam=2, device="cpu")
    with serving(load) as program:
        yield program


@pytest.mark.parametrize("temperature", [0, 1])
def test_clients_get_what_plain_decoding_writes(temperature, served, pair):
    def ask(index: int) -> str:
        body = {"model": "boxed", "prompt": PROMPTS[index], "max_tokens": 12, "ignore_eos": True}
        body |= {"temperature": temperature, "seed": index}
        answer = served.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(ask, range(len(PROMPTS))))
    for index, text in enumerate(texts):
        how = {"do_sample": True, "temperature": 1.0, "seed": index} if temperature else {"do_sample": False}
        assert text == text_of(pair, offline(pair, PROMPTS[index], 12, min_new_tokens=12, **how))
    metrics = served.metrics()
    assert max(value for name, value in metrics.items() if "draft" in name and "token" in name) > 0


NO_DRAFTS = {"speculate": False}
SETTINGS = [SamplingParams(temperature=0), SamplingParams(temperature=0.9, seed=5)]


@pytest.mark.variant
async def test_clients_at_once_get_what_each_would_alone():
    target = Target(recurrent_model("lfm2"))
    engine = DraftTarget(target, Target(recurrent_model("lfm2")), draft_len=3)
    served = Scheduler(engine, engine.make_memory(4), Limits(max_batch_size=4, max_seq_len=200))
    assert served.memory.store.rows == 4
    warm_up(served, SamplingParams())
    client = client_of(served)
    client.start()

    cases = [([5 + number, 6, 7] * (1 + number), 12, SETTINGS[number % 2]) for number in range(7)]
    try:
        texts = await asyncio.gather(*(written(client, *case) for case in cases))
    finally:
        client.stop()
    assert texts == [alone(engine, make_sequence(*case)) for case in cases]
    nothing_is_held(served)


@pytest.mark.parametrize("reuse", [True, False])
def test_tokens_after_which_recurrent_states_are_kept_are_skipped_and_counted(pair, tmp_path, reuse):
    recurrent_model("lfm2").save_pretrained(tmp_path)
    pair[1].save_pretrained(tmp_path)
    system, answers = [3 + 7 * n % 90 for n in range(82)], []
    load = LoadOptions(model=str(tmp_path), max_seq_len=200, device="cpu", dtype="float32")
    draft = DraftOptions(prompt_lookup=True)
    with serving(load, draft, max_batch_size=4, kv_cache_reuse=reuse) as program:
        for number, salt in ((5, "a"), (6, "a"), (7, "a"), (7, "b"), (7, "a")):
            body = {"prompt": [*system, number, 11, *range(20, 52)], "max_tokens": 8, "temperature": 0}
            body |= {"cache_salt": salt, "ignore_eos": True}
            answers.append(program.post("/v1/completions", body).json())
        metrics = program.metrics()
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == ([0, 0, 80, 0, 80] if reuse else [0] * 5)
    assert metrics["vllm:prefix_cache_hits_total"] == sum(cached)
    assert answers[2]["choices"] == answers[3]["choices"] == answers[4]["choices"]


@pytest.mark.parametrize(
    ("scheme", "words"), [(None, ""), ("fp8", ", FP8 weights"), ("int4", ", int4 weights in groups of 32")]
)
def test_the_log_has_the_scheme(scheme, words):
    pair = Pair.load(LoadOptions(device="cpu", quantization=scheme))
    server = server_of(pair)
    assert f" on cpu{words}; " in server.engine.facts.description[0]


def test_a_base_alone_is_served_with_recycled_tokens(pair, tmp_path, capsys):
    model = with_spread_weights(tiny_model("llama"), 0.6)
    model.save_pretrained(tmp_path)
    pair[1].save_pretrained(tmp_path)
    body = {"prompt": [5, 6, 7, 8, 5, 6], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with serving(LoadOptions(model=str(tmp_path), device="cpu", dtype="float32"), max_batch_size=2) as program:
        plain, *drafted = (program.post("/v1/completions", body | more).json() for more in (NO_DRAFTS, {}, {}))
        described = program.server.engine.facts.description[0]
    assert "; recycled tokens, {'num_beams'" in described
    assert "holds no drafter, so tokens are recycled as drafts" in capsys.readouterr().err
    assert [answer["choices"][0]["text"] for answer in drafted] == [plain["choices"][0]["text"]] * 2
    counts = [answer["metrics"]["speculative_decoding"]["num_draft_tokens"] for answer in (plain, *drafted)]
    assert counts[0] == 0
    assert counts[2] > 0


SAILORS = [f"Number {number} of the sailors told of {what} and the sea. " * 8 for number, what in enumerate("abcdef")]


def test_tokens_found_on_the_host_are_reported():
    with serving(LoadOptions(max_seq_len=200, kv_host_cache_gib=0.05, device="cpu"), max_batch_size=1) as program:
        bodies = [{"prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in (*SAILORS, SAILORS[0])]
        first, *_, again = [program.post("/v1/completions", body).json() for body in bodies]
        metrics = program.metrics()
    assert first["choices"] == again["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.8 * again["usage"]["prompt_tokens"]
    assert metrics["redrafter:kv_host_hits_total"] == metrics["vllm:prefix_cache_hits_total"] == cached
    assert metrics["redrafter:kv_host_blocks"] >= cached // 16
    assert any("more on the host" in line for line in program.server.engine.facts.description)


def test_a_cache_on_the_host_needs_reuse():
    with pytest.raises(UnsupportedError, match=r"exclude each other: .*, or leave out --no-kv-cache-reuse"):
        LoadEngine(ServeOptions(kv_cache_reuse=False), LoadOptions(kv_host_cache_gib=1.0), DraftOptions())


GOOD = [[5, 6, 7], [40, 41, 42, 43], [90] * 20]


def ask(url: str, prompt: list[int], **how: object) -> httpx.Response:
    body = {"model": "boxed", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **how}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def without(embedding: torch.nn.Module, token: int) -> Any:
    """Return a forward of an embedding that has no numbers for a token."""
    embed = embedding.forward
    return lambda ids: embed(ids).masked_fill((ids == token)[..., None], torch.nan)


def failures(server: Any) -> float:
    lines = server.metrics.text().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if '_total{finished_reason="error"' in line)


@pytest.mark.variant
def test_others_are_answered_and_later_ones_too(server, url, loaded, monkeypatch):
    before, embedding = failures(server), loaded.engine.model.get_input_embeddings()
    bad = embedding.num_embeddings - 1
    expected = [ask(url, prompt).json()["choices"][0]["text"] for prompt in GOOD]
    with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(embedding, "forward", without(embedding, bad))
        wrong = [pool.submit(ask, url, [*range(10, 60 + n), bad, 9, 8]) for n in range(3)]
        for text, prompt in zip(expected, GOOD, strict=True):
            assert pool.submit(ask, url, prompt).result().json()["choices"][0]["text"] == text
        for answer in (future.result() for future in wrong):
            assert answer.status_code == 500
            assert "no finite number after" in answer.json()["error"]["message"]
    assert [ask(url, prompt).json()["choices"][0]["text"] for prompt in GOOD] == expected
    assert failures(server) == before + 3
    assert ask(url, [*range(10, 60), bad, 9, 8]).status_code == 200  # nothing of it is found


def test_a_stream_has_what_was_written_before_and_then_the_reason(url, loaded, monkeypatch):
    engine = loaded.engine
    embedding, written = engine.model.get_input_embeddings(), ask(url, GOOD[0]).json()["choices"][0]["text"]
    ids = engine.generate(
        torch.tensor(GOOD[:1]), max_new_tokens=24, do_sample=False, speculate=False, eos_token_id=None
    )
    tokens = ids[0, len(GOOD[0]) :].tolist()
    last = next(n for n in range(6, 24) if tokens[n] not in tokens[:n] + GOOD[0])
    monkeypatch.setattr(embedding, "forward", without(embedding, tokens[last]))
    lines = ask(url, GOOD[0], stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(event["choices"][0]["text"] for event in events if event.get("choices"))
    assert text
    assert written.startswith(text)
    assert "no finite number after" in events[-1]["error"]["message"]
