"""Log-probabilities of prompts: the model's own, however the prompts were read and whatever was served beside them."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("openai")  # test_serve needs it

from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.models import VOCAB, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import KINDS, alone, make_sequence, nothing_is_held, random_sequences, run, scheduler
from helpers.serving import Program
from redrafter import DraftTarget, Engine, boxed_pair
from redrafter.scheduler.logprobs import score_prompt
from redrafter.scheduler.sequence import TokenSequence
from redrafter.target.target import Target

GREEDY = KINDS["greedy"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return with_tree(model, tiny_drafter(), 4, 4)


def scored_sequence(length: int, max_new_tokens: int = 0, count: int = 3, seed: int = 0) -> TokenSequence:
    made = random.Random(seed)
    return make_sequence(
        [made.randrange(3, VOCAB) for _ in range(length)], max_new_tokens, replace(GREEDY, prompt_logprobs=count)
    )


def check(engine: Engine, found: TokenSequence, atol: float = 1e-4) -> None:
    """Compare a sequence's scores with one forward of the model as transformers has it."""
    with torch.no_grad():
        logits = engine.model(torch.tensor([list(found.prompt)])).logits[0].float()
    lines = logits.log_softmax(-1)
    assert len(found.prompt_scores) == len(found.prompt) - 1
    for own, token, line in zip(found.prompt_scores, found.prompt[1:], lines, strict=False):
        assert own.logprob == pytest.approx(float(line[token]), abs=atol)
        surely, maybe = ((line > line[token] + shift).sum() for shift in (atol, -atol))
        assert 1 + surely <= own.rank <= maybe  # which counts the token itself
        expected = line.topk(found.params.prompt_logprobs)
        assert list(own.likeliest) == expected.indices.tolist()
        assert list(own.likeliest.values()) == pytest.approx(expected.values.tolist(), abs=atol)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_prompts_scores_are_the_models_own(architecture, masked, monkeypatch):
    """masked: read as on a GPU."""
    model = tiny_model(architecture)
    model.generation_config.eos_token_id = None
    engine = with_tree(model, tiny_drafter(), 3, 4)
    if masked:
        monkeypatch.setattr(engine.target.prompt_reader, "reads_without_masks", lambda cache: False)
    mine = [scored_sequence(length, seed=length) for length in (1, 2, 17, 40)]
    run(scheduler(engine), mine)
    for each in mine:
        check(engine, each)
        assert each.sink.tokens == []
        assert each.sink.deltas[-1].finish == "length"


@pytest.mark.parametrize("limits", [{"max_num_tokens": 16}, {"max_num_tokens": 50}, {"chunked": False}], ids=str)
@pytest.mark.parametrize("apart", [0, 2])
def test_chunks_and_neighbours_change_nothing(limits, apart, engine):
    scored = [
        scored_sequence(length, max_new_tokens, seed=length)
        for length, max_new_tokens in ((40, 0), (33, 9), (2, 5), (60, 0), (25, 1))
    ]
    mixed = [each for pair in zip(scored, random_sequences(5, seed=3), strict=True) for each in pair]
    served = scheduler(engine, **limits)
    run(served, mixed, apart)
    for each in scored:
        check(engine, each)
    for each in mixed:
        assert each.sink.tokens == (alone(engine, each) if each.max_new_tokens else [])
    nothing_is_held(served)


def test_forwards_are_cut_where_their_logits_would_be_too_many(engine, monkeypatch):
    served = scheduler(engine)
    monkeypatch.setattr("redrafter.target.prompt_reader.MAX_SHOWN_LOGITS", 7 * VOCAB)
    monkeypatch.setattr("redrafter.scheduler.logprobs.MAX_LOGITS_AT_ONCE", 3 * VOCAB)
    seen: list[int] = []
    hook = engine.model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
    mine = [scored_sequence(40), scored_sequence(31, seed=2)]
    run(served, mine)
    hook.remove()
    assert sum(seen) == 71
    assert max(seen) <= 7
    for each in mine:
        check(engine, each)


def test_a_prompt_that_was_read_is_read_again_to_be_scored_and_found_by_others(engine):
    plain, served = scored_sequence(40, max_new_tokens=4), scheduler(engine)
    first = make_sequence(plain.prompt, 4, GREEDY)
    run(served, [first])
    run(served, [plain])
    check(engine, plain)
    assert plain.reused == 0
    assert plain.sink.tokens == first.sink.tokens
    again = make_sequence(plain.prompt, 4, GREEDY)
    run(served, [again])
    assert again.reused == 32
    assert again.sink.tokens == first.sink.tokens


def test_what_is_put_back_is_scored_once_and_whole(engine):
    scored = [scored_sequence(20 + seed, max_new_tokens=40, seed=seed) for seed in range(6)]
    served = scheduler(engine, blocks=16, max_num_tokens=24)
    run(served, [*scored, *random_sequences(6, longest=30, max_new_tokens=50)])
    assert served.preempted > 3
    for each in scored:
        check(engine, each)
        assert each.sink.tokens == alone(engine, each)
    nothing_is_held(served)


def test_a_draft_models_server_scores_by_the_target():
    target, draft = tiny_model("llama"), tiny_model("qwen2", num_hidden_layers=1)
    target.generation_config.eos_token_id = None
    engine = DraftTarget(Target(target), Target(draft), draft_len=3)
    mine = [scored_sequence(30, max_new_tokens=6), *random_sequences(3)]
    run(scheduler(engine, blocks=40, max_num_tokens=40), mine)
    check(engine, mine[0])
    assert all(each.sink.tokens == alone(engine, each) for each in mine)


def test_nobody_else_pays_for_it(engine):
    """The head is computed at every token of the prompt that is scored, and at one of the other."""
    served, seen = scheduler(engine), list[int]()
    hook = engine.model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
    run(served, [scored_sequence(30), make_sequence([7] * 50, 1, GREEDY)])
    hook.remove()
    assert sorted(seen) == [1, 30]


def test_a_rank_counts_what_is_likelier_and_minus_infinity_is_a_number():
    logits = torch.tensor([[0.0, 2.0, 1.0, -torch.inf], [5.0, 0.0, 0.0, 0.0]])
    first, second = score_prompt(logits, [3, 0], 4)
    assert (first.rank, first.logprob, list(first.likeliest)) == (4, -9999.0, [1, 2, 0, 3])
    assert first.likeliest[3] == -9999.0
    assert second.rank == 1
    [none] = score_prompt(logits, [2], 0)
    assert none.rank == 2
    assert none.likeliest == {}


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    found = Program("--max-batch-size", "8")
    yield found
    assert found.end() == 0


@pytest.fixture(scope="module")
def pair() -> tuple:
    return AutoModelForCausalLM.from_pretrained(boxed_pair()), AutoTokenizer.from_pretrained(boxed_pair())


def post(program: Program, path: str = "completions", **body: object) -> httpx.Response:
    return httpx.post(f"{program.url}/v1/{path}", json=body, timeout=300)


TEXT = "The old man looked at the sea, caf\u00e9 \U0001f600 and"


def test_an_echoed_prompt_is_told_with_its_log_probabilities(program, pair):
    model, tokenizer = pair
    answer = post(program, prompt=TEXT, max_tokens=0, echo=True, logprobs=2).json()
    [choice] = answer["choices"]
    ids = tokenizer(TEXT).input_ids
    with torch.no_grad():
        lines = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    told = choice["logprobs"]
    expected = lines[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    best = lines[:-1].max(dim=-1).values.tolist()
    assert [max(top.values()) for top in told["top_logprobs"][1:]] == pytest.approx(best, abs=1e-4)
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:])
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    offsets = told["text_offset"]
    assert offsets == sorted(offsets)
    assert TEXT[offsets[-1] :] == tokenizer.decode(ids[-1:])
    assert told["tokens"] == [tokenizer.decode([token]) for token in ids]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_what_follows_is_told_behind_the_prompt_also_in_a_stream(program):
    body = {"prompt": [TEXT, "She said"], "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 3, "n": 2}
    whole = post(program, **body).json()["choices"]
    found = [{name: [] for name in whole[0]["logprobs"]} for _ in whole]
    for line in post(program, **body, stream=True).text.split("\n\n"):
        if line.startswith("data: {"):
            [choice] = json.loads(line[6:])["choices"]
            for name, values in choice["logprobs"].items():
                found[choice["index"]][name] += values
    assert [choice["logprobs"]["tokens"] for choice in whole] == [each["tokens"] for each in found]
    assert [choice["logprobs"]["text_offset"] for choice in whole] == [each["text_offset"] for each in found]
    for mine, theirs in zip(found, whole, strict=True):
        told = theirs["logprobs"]["token_logprobs"]
        assert told[0] is None
        assert mine["token_logprobs"][1:] == pytest.approx(told[1:], abs=1e-4)


def test_prompt_logprobs_are_told_as_vllm_tells_them(program, pair):
    model, tokenizer = pair
    ids = tokenizer(TEXT).input_ids
    with torch.no_grad():
        lines = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    [choice] = post(program, prompt=TEXT, max_tokens=1, prompt_logprobs=3).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    assert choice["logprobs"] is None
    for told, token, line in zip(others, ids[1:], lines, strict=False):
        ranked = line.sort(descending=True).indices.tolist()
        assert next(iter(told)) == f"{token}"
        assert set(told) == {f"{each}" for each in (token, *ranked[:3])}
        for each, entry in told.items():
            assert entry["logprob"] == pytest.approx(float(line[int(each)]), abs=1e-4)
            assert entry["rank"] == ranked.index(int(each)) + 1
            assert entry["decoded_token"] == tokenizer.decode([int(each)])
    talk = [{"role": "user", "content": "Hello"}]
    answer = post(program, "chat/completions", messages=talk, max_tokens=1, prompt_logprobs=0).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(each) == 1 for each in answer["prompt_logprobs"][1:])


def test_the_best_of_several_are_those_of_the_likeliest_tokens(program):
    body = {"prompt": ["Once upon a time", "She said"], "max_tokens": 12, "seed": 5, "temperature": 1.5}
    every = post(program, n=6, logprobs=0, ignore_eos=True, **body).json()["choices"]
    found = post(program, n=2, best_of=6, ignore_eos=True, **body).json()
    for place in range(2):
        told = every[6 * place : 6 * place + 6]
        told.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]) / 12)
        mine = found["choices"][2 * place : 2 * place + 2]
        assert [choice["text"] for choice in mine] == [choice["text"] for choice in told[:2]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in found["choices"])
    assert found["usage"]["completion_tokens"] == 2 * 6 * 12


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"max_tokens": 0}, 422, "echo=true"),
        ({"prompt_logprobs": 1, "stream": True}, 422, "not told in a stream"),
        ({"prompt_logprobs": 21}, 422, "20"),
        ({"best_of": 1, "n": 2}, 422, "best_of must be n or more"),
        ({"best_of": 2, "stream": True}, 422, "cannot be streamed"),
        ({"prompt": ["a b c d e f g " * 20] * 200, "prompt_logprobs": 20}, 400, "ask for fewer"),
    ],
)
def test_what_cannot_be_told_is_refused(body, status, says, program):
    answer = post(program, **{"prompt": "a"} | body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
