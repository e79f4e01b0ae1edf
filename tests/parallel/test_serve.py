"""A server whose model two ranks share, compared with one process."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.adapters import adapted
from helpers.processes import children, engine_of, soon
from helpers.ranks import environment, launch
from helpers.serving import Program, offline, text_of
from redrafter import PromptLookup, ReDrafter

pytestmark = pytest.mark.slow
NEW = 30
EXIT_SECONDS = 30.0  # in which a server ends after a rank is lost


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Program]:
    program = Program(str(folder / "merged"), "--dtype", "float32", "--max-batch-size", "4", ranks=2)
    yield program
    program.end()


@pytest.fixture(scope="module")
def pair(folder) -> tuple:
    return ReDrafter.from_pretrained(folder / "merged"), AutoTokenizer.from_pretrained(folder / "merged")


def ask(server: Program, prompt: str, **fields: object) -> httpx.Response:
    body = {"model": "merged", "prompt": prompt, "max_tokens": NEW} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


@pytest.mark.parametrize("temperature", [0, 1])
def test_concurrent_requests_get_the_texts_of_one_process(server, pair, temperature):
    prompts = [f"{number} € für" for number in range(10)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt, seed=7, temperature=temperature), prompts))
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    settings = {"do_sample": True, "seed": 7} if temperature else {"do_sample": False}
    assert texts == [text_of(pair, offline(pair, prompt, NEW, **settings)) for prompt in prompts]


def test_a_client_that_goes_stops_nothing(server):
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"model": "merged", "prompt": "ja", "max_tokens": 100, "stream": True},
        timeout=300,
    ) as answer:
        next(answer.iter_lines())
    server.wait_until_idle()
    assert ask(server, "ja").status_code == 200


def test_a_request_that_cannot_be_served_is_refused_alone(server):
    assert ask(server, "ja" * 200).status_code == 400
    assert ask(server, "ja").status_code == 200


@pytest.mark.parametrize("temperature", [0, 1])
def test_texts_that_follow_grammars_are_those_of_one_process_next_to_free_ones(server, pair, temperature):
    grammars = [None, {"regex": "[a-z]{5,9}( [a-z]{2,9}){1,3}"}, {"choice": ["ja, sicher", "nein"]}, None]
    prompts = [f"{number} € für" for number in range(len(grammars))]

    def answer(prompt: str, grammar: dict | None) -> str:
        fields = {} if grammar is None else {"structured_outputs": grammar}
        return ask(server, prompt, seed=7, temperature=temperature, **fields).json()["choices"][0]["text"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(answer, prompts, grammars))
    settings = {"do_sample": True, "seed": 7} if temperature else {"do_sample": False}
    for prompt, grammar, text in zip(prompts, grammars, texts, strict=True):
        guided = {} if grammar is None else {"grammar": grammar, "tokenizer": pair[1]}
        assert text == text_of(pair, offline(pair, prompt, NEW, **settings, **guided)), prompt


def test_a_grammar_whose_process_ends_ends_its_text_on_all_ranks(server):
    body = {"model": "merged", "prompt": "ja", "max_tokens": 140, "structured_outputs": {"regex": "[a-z]{300}"}}
    engine = psutil.Process(engine_of(sorted(children(server.process.pid))[0]))
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        for process in engine.children(recursive=True):
            process.kill()
        *_, last = lines
    assert "grammar: given up after" in last
    assert ask(server, "ja").status_code == 200  # the other rank has ended that text too
    assert ask(server, "ja", structured_outputs={"choice": ["nein"]}).json()["choices"][0]["text"] == "nein"


def test_an_operator_changes_the_engine_of_all_ranks(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(tmp_path)
    program = Program(
        str(folder / "merged"),
        "--dtype",
        "float32",
        "--operator-key",
        "sesame",
        "--allow-runtime-lora-updating",
        ranks=2,
    )

    def operate(what: str, **body: str) -> httpx.Response:
        headers = {"Authorization": "Bearer sesame"}
        return httpx.post(f"{program.url}/v1/{what}", json=body or None, headers=headers, timeout=300)

    def write(model: str = "merged") -> str:
        return ask(program, "ja", seed=7, temperature=1, model=model).json()["choices"][0]["text"]

    before = write()
    refused = operate("update_weights", path=str(folder / "small"))
    assert (refused.status_code, write()) == (400, before)
    assert operate("drafter", path=str(folder / "merged" / "drafter")).json()["drafter_number"] == 1
    assert write() == before
    assert operate("update_weights", path=str(tmp_path)).status_code == 200
    changed = PromptLookup.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    expected = text_of(changed, offline(changed, "ja", NEW, do_sample=True, seed=7))
    assert write() == expected != before
    assert operate("sleep").json()["asleep"] is True
    assert ask(program, "ja").status_code == 503
    assert operate("wake").json()["asleep"] is False
    assert write() == expected
    adapted(model=model, lora_alpha=2).save_pretrained(tmp_path / "adapter")
    assert operate("load_lora_adapter", lora_name="it", lora_path=str(tmp_path / "adapter")).status_code == 200
    changed[0].load_adapter("it", tmp_path / "adapter")
    assert (
        write("it") == text_of(changed, offline(changed, "ja", NEW, do_sample=True, seed=7, adapter="it")) != expected
    )
    assert operate("load_lora_adapter", lora_name="other", lora_path=str(folder)).status_code == 404
    assert operate("unload_lora_adapter", lora_name="it").status_code == 200
    assert write() == expected
    program.end()


def test_it_ends_its_texts_when_torchrun_is_ended(folder):
    program = Program(str(folder / "merged"), ranks=2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, program, "ja", max_tokens=100)
        assert soon(lambda: answer.done() or program.metrics()["vllm:num_requests_running"])
        program.end()
        assert answer.result().status_code == 200


def test_a_server_starts_its_own_ranks_and_ends_with_all_of_them(folder, pair):
    program = Program(str(folder / "merged"), "--dtype", "float32", "--tensor-parallel-size", "2")
    ranks = children(program.process.pid)
    assert len(ranks) == 2
    text = ask(program, "ja", seed=7, temperature=1).json()["choices"][0]["text"]
    assert text == text_of(pair, offline(pair, "ja", NEW, do_sample=True, seed=7))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, program, "ja", max_tokens=100)
        assert soon(lambda: answer.done() or program.metrics()["vllm:num_requests_running"])
        assert program.end() == 0
        assert answer.result().status_code == 200
    assert not any(psutil.pid_exists(pid) for pid in ranks)


def engine_of_rank(program: Program, rank: int) -> int:
    """Return the process of a rank's engine: on rank 0 the server's child, on others the rank's own process."""
    own = sorted(children(program.process.pid))[rank]
    return engine_of(own) if rank == 0 else own


@pytest.mark.parametrize(
    ("rank", "sent", "said"),
    [
        (1, signal.SIGKILL, "the process of rank 1 has ended (the launcher reports how)"),
        (1, signal.SIGSTOP, "the process of rank 1 is stopped"),
        (0, signal.SIGSTOP, "the engine's process was ended by SIGKILL"),  # the other rank ends what is stopped
    ],
)
def test_clients_hear_which_rank_is_lost(folder, rank, sent, said):
    program = Program(str(folder / "merged"), ranks=2)
    body = {"model": "merged", "prompt": "ja", "max_tokens": 140, "ignore_eos": True, "stream": True}
    victim = engine_of_rank(program, rank)
    with httpx.stream("POST", f"{program.url}/v1/completions", json=body, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        os.kill(victim, sent)
        began = time.monotonic()
        *_, last = lines
    assert program.process.wait(timeout=300) != 0
    assert time.monotonic() - began < EXIT_SECONDS
    assert said in last
    assert any(f"error: {said}" in line for line in program.log)
    assert not any("Traceback" in line for line in program.log if line.startswith("  "))
    assert not psutil.pid_exists(victim)


def test_a_rank_that_is_killed_while_it_loads_ends_the_server(folder):
    words = launch(2, "redrafter", "serve", "--port", "0", folder / "merged", module=True)
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("; loading" in line for line in iter(process.stderr.readline, ""))
        os.kill(sorted(children(process.pid))[1], signal.SIGKILL)
        began = time.monotonic()
        _, log = process.communicate(timeout=300)
        assert time.monotonic() - began < EXIT_SECONDS
        assert process.returncode != 0
        assert [line for line in log.splitlines() if "redrafter: " in line] == [
            "redrafter: stopped while the model was being loaded"
        ]
    finally:
        process.kill()
        process.wait()


def test_the_ranks_end_where_torchrun_is_killed(folder):
    program = Program(str(folder / "merged"), ranks=2)
    ranks = children(program.process.pid)
    began = time.monotonic()
    program.process.kill()
    assert soon(lambda: not any(psutil.pid_exists(pid) for pid in ranks))
    assert time.monotonic() - began < EXIT_SECONDS


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_server(folder, rank):
    program = Program(str(folder / "merged"), ranks=2)
    os.kill(sorted(children(program.process.pid))[rank], signal.SIGKILL)
    assert program.process.wait(timeout=300) != 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{program.url}/health", timeout=300)
