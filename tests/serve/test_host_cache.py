"""A server whose texts leave the cache for the host's memory: what it reports, and what it refuses to start with."""

import pytest

pytest.importorskip("fastapi")

from helpers.serving import Program, openai
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import LoadEngine

PROMPTS = [f"Number {number} of the sailors told of {what} and the sea. " * 8 for number, what in enumerate("abcdef")]


def test_tokens_found_on_the_host_are_reported():
    program = Program("--max-batch-size", "1", "--max-seq-len", "200", "--kv-host-cache-gib", "0.05")
    client = openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0)
    settings = {"model": "boxed", "max_tokens": 8, "temperature": 0}
    first, *_, again = [client.completions.create(prompt=prompt, **settings) for prompt in (*PROMPTS, PROMPTS[0])]
    metrics = program.metrics()
    assert program.end() == 0
    assert (first.choices[0].text, first.usage.prompt_tokens_details.cached_tokens) == (again.choices[0].text, 0)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached > 0.8 * again.usage.prompt_tokens
    assert metrics["redrafter:kv_host_hits_total"] == metrics["vllm:prefix_cache_hits_total"] == cached
    assert metrics["redrafter:kv_host_blocks"] >= cached // 16
    assert any("more on the host" in line for line in program.log)


def test_a_cache_on_the_host_needs_reuse():
    with pytest.raises(ArgumentError, match="--kv-host-cache-gib stores what --no-kv-cache-reuse never finds"):
        LoadEngine(ServeOptions(kv_cache_reuse=False), LoadOptions(kv_host_cache_gib=1.0), DraftOptions())


@pytest.mark.parametrize("gib", [-1.0, float("nan"), 1e9])
def test_a_size_that_cannot_be_is_refused_before_anything_is_loaded(gib: float):
    with pytest.raises(ArgumentError, match=r"--kv-host-cache-gib\) must be from 0 to the machine's memory"):
        LoadOptions(kv_host_cache_gib=gib)
