"""What load generators ask of the server, and read: usage in every part, counters that add up, no waiting packets."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")  # test_serve needs it

from helpers.serving import PROMPTS
from redrafter.scheduler.sequence import Stats
from redrafter.serve.answers.choice import speculation_metrics
from redrafter.serve.command import listen
from redrafter.serve.config import ServeOptions

BOTH = {"include_usage": True, "continuous_usage_stats": True}
ASKED = {
    "/v1/completions": {"prompt": PROMPTS[0], "max_tokens": 40, "logprobs": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}],
        "max_completion_tokens": 40,
        "logprobs": True,
    },
}


@pytest.mark.parametrize("path", ASKED)
def test_every_part_tells_what_its_choice_has_come_to(path, program):
    body = {"model": "boxed", "stream": True, "ignore_eos": True, "seed": 2, "n": 2, **ASKED[path]}
    *texts, last = program.parts(path, body | {"stream_options": BOTH})
    written = [0, 0]
    for part in texts:
        [choice] = part["choices"]
        reported, usage = choice["logprobs"], part["usage"]
        written[choice["index"]] += len(reported["tokens"] if path == "/v1/completions" else reported["content"])
        assert usage["completion_tokens"] == written[choice["index"]]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert "metrics" not in part
    assert written == [40, 40]
    assert len(texts) > 4
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 80
    assert "metrics" in last
    once = program.parts(path, body | {"stream_options": {"include_usage": True}})
    assert all(part["usage"] is None for part in once[:-1])
    assert once[-1]["usage"] == last["usage"]
    alone = program.parts(path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in part for part in alone)  # as vLLM has it


def test_counters_rise_by_what_the_answers_tell(program):
    """Twenty rows step with drafts or without, as costs have it: steps without are none of speculation's."""

    def ask(prompts: list[str], count: int, speculate: bool = True) -> dict:
        body = {"prompt": prompts, "max_tokens": count, "ignore_eos": True, "temperature": 0, "speculate": speculate}
        return program.post("/v1/completions", body).json()

    program.wait_until_idle()
    before = program.metrics()
    with ThreadPoolExecutor() as pool:
        prompts = [PROMPTS[1]] * 20, [PROMPTS[2]], [PROMPTS[3]] * 3, [PROMPTS[2]]
        answers = list(
            pool.map(ask, prompts, (20, 400, 90, 40), (True, True, True, False))
        )  # 400: longer than any pause
    after = program.metrics()
    rise = {name: after[name] - before.get(name, 0) for name in after}  # a drafter's first draft adds its own
    reported = [answer["metrics"]["speculative_decoding"] for answer in answers]
    for name, field in (
        ("vllm:spec_decode_num_drafts", "num_spec_steps"),
        ("vllm:spec_decode_num_draft_tokens", "num_draft_tokens"),
        ("vllm:spec_decode_num_accepted_tokens", "num_accepted_draft_tokens"),
        ("redrafter:spec_decode_num_copied_draft_tokens", "num_copied_draft_tokens"),
        ("redrafter:spec_decode_num_accepted_copied_tokens", "num_accepted_copied_tokens"),
    ):
        assert rise[f"{name}_total"] == sum(counts[field] for counts in reported)
    assert rise["vllm:spec_decode_num_accepted_tokens_total"] > 0
    for place in range(5):
        accepted = sum(sum(counts["acceptance_histogram"][place + 1 :]) for counts in reported)
        assert rise[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}}'] == accepted
    usages = [answer["usage"] for answer in answers]
    assert rise["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert rise['vllm:request_success_total{finished_reason="length"}'] == 25
    many, plain = reported[0], reported[3]
    assert plain["num_spec_steps"] == plain["num_draft_tokens"] == 0
    # Each row's first token comes before any step, and its last one may be a draft, with no token of the step's own.
    assert many["num_spec_steps"] + many["num_accepted_draft_tokens"] <= usages[0]["completion_tokens"]
    for counts in reported:
        assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"]
        assert len(counts["acceptance_histogram"]) == counts["num_spec_tokens"] + 1


def test_a_text_without_drafts_comes_to_one_token_a_step():
    reported = speculation_metrics(Stats(accepted_by_depth=[0] * 3))
    names = "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"
    assert [reported[name] for name in names] == [1.0, 0.0, [0] * 4, 0]


def test_all_metrics_are_there_before_the_first_request(program):
    """Else what a client finds first is taken for where it began."""
    for name in (
        *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}}' for place in range(5)),
        *(f'vllm:request_success_total{{finished_reason="{why}"}}' for why in ("stop", "length", "abort", "error")),
        "vllm:num_preemptions_total",
        "redrafter:asleep",
    ):
        assert program.first_metrics[name] == 0
    assert "vllm:request_time_per_output_token_seconds_count" in program.first_metrics


def test_steps_are_counted_while_a_text_is_written(program):
    program.wait_until_idle()
    before = program.metrics()
    body = {"prompt": PROMPTS[0], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{program.url}/v1/completions", json=body, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for count, _ in enumerate(lines, start=1):
            now = program.metrics()
            # Drafting may pause for some steps, by what became of the drafts of earlier texts.
            if (
                count >= 6
                and now["vllm:spec_decode_num_drafts_total"] > before["vllm:spec_decode_num_drafts_total"] + 4
            ):
                break
    assert now["vllm:num_requests_running"] == 1
    assert now["vllm:spec_decode_num_drafts_total"] >= before["vllm:spec_decode_num_drafts_total"] + 5
    for _ in range(500):
        gone = program.metrics()
        if not gone["vllm:num_requests_running"]:
            break
    name = 'vllm:request_success_total{finished_reason="abort"}'
    assert gone[name] == before[name] + 1


def test_the_share_of_a_prompt_that_was_found_can_be_told(program):
    program.wait_until_idle()
    before = program.metrics()
    body = {"prompt": "The tide came in over the sand, and with it came the boats. " * 4, "max_tokens": 2}
    usages = [program.post("/v1/completions", body).json()["usage"] for _ in range(2)]
    after = program.metrics()
    for name, expected in (
        ("queries", sum(usage["prompt_tokens"] for usage in usages)),
        ("hits", usages[1]["prompt_tokens_details"]["cached_tokens"]),
    ):
        name = f"vllm:prefix_cache_{name}_total"
        assert after[name] - before[name] == expected > 0


async def test_small_packets_do_not_wait():
    """A first token behind the answer's head is a small packet; without this it waits for the client's delayed
    acknowledgement, 40 ms."""

    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    def come(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer)  # which closes the connection once nobody has it

    async with await asyncio.start_server(come, sock=listen(ServeOptions(port=0))) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        accepting = await accepted
        assert accepting.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        accepting.close()
