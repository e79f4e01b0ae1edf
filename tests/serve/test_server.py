"""The server as clients see it: the real `openai` client against the running program, on the boxed pair."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from helpers.serving import PROMPTS, SCHEMA, Program, offline, text_of


def test_a_completion_is_what_generate_writes(client, pair):
    # So long that drafting goes on within it, whatever the texts before it have made it pause for.
    answer = client.completions.create(model="boxed", prompt=PROMPTS[0], max_tokens=200, temperature=0)
    assert answer.choices[0].text == text_of(pair, offline(pair, PROMPTS[0], 200, do_sample=False))
    assert answer.usage.completion_tokens == 200
    assert answer.choices[0].finish_reason == "length"
    spec = answer.model_extra["metrics"]["speculative_decoding"]
    assert spec["num_spec_steps"] == sum(spec["acceptance_histogram"])
    assert spec["mean_acceptance_length"] > 1
    assert spec["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"temperature": 0.8}, {}),
        ({"temperature": 1.2, "top_p": 0.7}, {}),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, {}),
        ({"logit_bias": {"300": 5, "12": -100}}, {"logit_bias": {300: 5.0, 12: -100.0}}),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_seeds_and_settings_are_those_of_generate(client, pair, settings, own):
    extra = {"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1}
    answer = client.completions.create(
        model="boxed", prompt=PROMPTS[1], max_tokens=24, seed=7, extra_body=extra, **settings
    )
    expected = offline(pair, PROMPTS[1], 24, seed=7, **({"temperature": 1.0} | settings | extra | own))
    assert answer.choices[0].text == text_of(pair, expected)


def test_several_prompts_and_several_texts_of_each(client, pair):
    prompts = PROMPTS[:2]
    answer = client.completions.create(model="boxed", prompt=prompts, n=2, max_tokens=12, seed=5, temperature=0.9)
    for index, choice in enumerate(answer.choices):
        assert choice.index == index
        expected = offline(pair, prompts[index // 2], 12, seed=5 + index, temperature=0.9)
        assert choice.text == text_of(pair, expected)
    ids = [pair[1](prompt).input_ids for prompt in prompts]
    again = client.completions.create(model="boxed", prompt=ids, n=2, max_tokens=12, seed=5, temperature=0.9)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_joins_to_the_whole(client, kind):
    talk = {"messages": [{"role": "user", "content": "Tell me of the sea"}]}
    where = client.completions if kind == "completion" else client.chat.completions
    given = {"prompt": PROMPTS[0]} if kind == "completion" else talk
    settings = {"model": "boxed", "max_tokens": 40, "seed": 3, "n": 2, **given}
    whole = where.create(**settings)
    texts, ended, usage = ["", ""], [None, None], None
    for part in where.create(**settings, stream=True, stream_options={"include_usage": True}):
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += (choice.text if kind == "completion" else choice.delta.content) or ""
            ended[choice.index] = choice.finish_reason or ended[choice.index]
    assert texts == [c.text if kind == "completion" else c.message.content for c in whole.choices]
    assert ended == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_nothing_of_a_stop_string_is_shown(client, pair):
    whole = text_of(pair, offline(pair, PROMPTS[0], 60, do_sample=False))
    words = whole.split()
    stop = f"{words[6]} {words[7][:2]}"  # begins in one token and ends in another
    settings = {
        "model": "boxed",
        "prompt": PROMPTS[0],
        "max_tokens": 60,
        "temperature": 0,
        "stop": [stop, "never this"],
    }
    answer = client.completions.create(**settings)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop  # vLLM's field
    streamed = [part.choices[0].text for part in client.completions.create(**settings, stream=True)]
    assert "".join(streamed) == answer.choices[0].text
    tokens = offline(pair, PROMPTS[0], 60, do_sample=False, stop_strings=[stop], tokenizer=pair[1])
    assert answer.usage.completion_tokens == len(tokens)


def test_each_prompt_of_a_request_counts_though_another_is_the_same(client):
    settings = {"model": "boxed", "max_tokens": 2, "temperature": 0}
    one, two = (client.completions.create(prompt=prompt, **settings).usage for prompt in ("Hello", ["Hello", "Hello"]))
    assert two.prompt_tokens == 2 * one.prompt_tokens
    assert client.completions.create(prompt="Hello", n=2, **settings).usage.prompt_tokens == one.prompt_tokens


def test_a_beginning_that_was_read_is_found(client):
    system = "You are a patient storyteller who knows the sea, its ships and its weather. " * 4
    talks = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in ("Hello", "Who?")]
    settings = {"model": "boxed", "max_tokens": 5, "temperature": 0}
    client.chat.completions.create(messages=talks[0], **settings)
    usage = client.chat.completions.create(messages=talks[1], **settings).usage
    assert usage.prompt_tokens_details.cached_tokens > 0.5 * usage.prompt_tokens


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (openai.BadRequestError, {"extra_body": {"nonsense": 1}}, "nonsense"),
        (openai.BadRequestError, {"suffix": "b"}, "suffix"),
        (openai.BadRequestError, {"prompt": [[10**9]]}, "prompt"),
        (openai.BadRequestError, {"prompt": "word " * 4000}, "prompt"),
        (openai.BadRequestError, {"prompt": []}, "prompt"),
        (openai.BadRequestError, {"logit_bias": {"99999999": 1}}, "logit_bias"),
        (openai.NotFoundError, {"model": "another"}, "model"),
        (openai.BadRequestError, {"temperature": -1}, "temperature"),
        (openai.BadRequestError, {"max_tokens": "many"}, "max_tokens"),
        (openai.BadRequestError, {"stop": [""]}, "stop.0"),
    ],
)
def test_what_is_wrong_is_said_in_the_shape_of_openai(client, kind, body, param):
    with pytest.raises(kind) as refusal:
        client.completions.create(**({"model": "boxed", "prompt": "a"} | body))
    assert refusal.value.body["message"]
    assert refusal.value.param == param


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({"regex": "[a-f]{3,9}-[0-9]{2}"}, lambda text: re.fullmatch("[a-f]{3,9}-[0-9]{2}", text)),
        ({"choice": ["yes", "no", "perhaps"]}, lambda text: text in ("yes", "no", "perhaps")),
        ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "age"}),
    ],
    ids=["regex", "choice", "json"],
)
def test_texts_follow_their_grammars(client, pair, spec, fits, temperature):
    settings = {"prompt": "Answer:", "max_tokens": 60, "seed": 4, "temperature": temperature}
    answer = client.completions.create(model="boxed", **settings, extra_body={"structured_outputs": spec})
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert fits(choice.text)
    own = {"do_sample": False} if temperature == 0 else {"temperature": temperature, "seed": 4}
    grammar = {"json_schema": spec["json"]} if "json" in spec else spec
    ids = offline(pair, "Answer:", 60, grammar=grammar, tokenizer=pair[1], **own)
    assert choice.text == text_of(pair, ids)


def test_a_response_format_is_kept_to(client):
    talk = [{"role": "user", "content": "Who are you?"}]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    same = {"model": "boxed", "messages": talk, "max_tokens": 120, "seed": 1}  # another text may be longer
    answer = client.chat.completions.create(response_format=form, n=3, **same)
    assert all(0 <= json.loads(choice.message.content)["age"] <= 99 for choice in answer.choices)
    lark = {"type": "lark_grammar", "lark_grammar": 'start: "(" /[0-9]{2,4}/ ")"'}
    answer = client.chat.completions.create(response_format=lark, **same)
    assert re.fullmatch(r"\([0-9]{2,4}\)", answer.choices[0].message.content)
    with pytest.raises(openai.APIStatusError, match="only then"):
        client.chat.completions.create(response_format={"type": "lark_grammar"}, **same)
    with pytest.raises(openai.BadRequestError, match="grammar"):
        broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
        client.chat.completions.create(model="boxed", messages=talk, response_format=broken)


EXAMPLES = Path(__file__).parents[2] / "examples" / "server"
SAYS = {
    "completion.py": "tokens per step",
    "json_schema.py": "'flags': '-",
    "streaming.py": "[",
    "tools.py": "tide({'place': ",
}


@pytest.mark.parametrize("script", SAYS)
def test_the_example_runs(script, program):
    command = [sys.executable, str(EXAMPLES / script), program.url]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert SAYS[script] in run.stdout
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.slow
def test_requests_are_logged():
    program = Program("--log-format", "json")
    body = {"prompt": "The sea", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    answer = program.post("/v1/completions", body, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    with httpx.stream("POST", f"{program.url}/v1/completions", json=body | {"stream": True, "max_tokens": 5}) as left:
        list(left.iter_lines())
    refused = program.post("/v1/chat/comp%0aletions", body)
    assert program.end() == 0
    lines = [json.loads(line) for line in program.log]
    first, second, last = [line for line in lines if "status" in line]
    speculation = answer.json()["metrics"]["speculative_decoding"]
    assert first["id"] == "mine"
    assert first["status"] == 200
    assert first["completion_tokens"] == 9
    assert first["tokens_per_step"] == pytest.approx(speculation["mean_acceptance_length"], abs=1e-3)
    assert 0 < first["first_token_seconds"] < first["seconds"]
    assert first["finish"] == "length"
    assert second["completion_tokens"] == 5
    assert second["prompt_tokens"] == first["prompt_tokens"]
    assert (last["status"], last["path"]) == (400, "/v1/chat/comp%0aletions")
    assert last["id"] == refused.headers["x-request-id"]


@pytest.mark.slow
def test_a_key_is_asked_for_and_stopping_lets_texts_end():
    program = Program("--api-key", "secret", "--served-model-name", "mine")
    body = {"prompt": "The sea", "max_tokens": 300, "temperature": 0, "stream": True, "ignore_eos": True}
    assert program.post("/v1/completions", body).status_code == 401
    assert program.get("/health").status_code == 200
    key = {"Authorization": "Bearer secret"}
    with httpx.stream("POST", f"{program.url}/v1/completions", json=body, headers=key, timeout=300) as answer:
        lines = answer.iter_lines()
        next(lines)
        program.process.send_signal(signal.SIGTERM)
        while program.healthy:
            time.sleep(0.02)
        late = program.post("/v1/completions", body, headers=key)
        assert late.status_code == 503
        assert "Retry-After" in late.headers
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert program.process.wait(timeout=300) == 0
