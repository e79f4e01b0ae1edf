"""What tests of the server share."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from redrafter import ReDrafter, boxed_pair


@pytest.fixture(scope="session")
def pair() -> tuple:
    os.environ.pop("REDRAFTER_HOME", None)
    return ReDrafter.from_pretrained(boxed_pair()), AutoTokenizer.from_pretrained(boxed_pair())


@pytest.fixture(scope="session")
def program() -> Iterator[Any]:
    """`redrafter serve` of the boxed pair in a process of its own, for all tests that need no options of theirs.

    Tests share its caches and counters, and take differences of these. It must end with code 0 and leave no process.
    """
    from helpers.processes import children, soon
    from helpers.serving import Program

    program = Program("--max-batch-size", "64")
    program.first_metrics = program.metrics()  # before any request
    yield program
    started = children(program.process.pid)
    assert program.end() == 0
    assert soon(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))


@pytest.fixture(scope="session")
def client(program: Any) -> Any:
    """The OpenAI client of `program`."""
    import openai

    return openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0)
