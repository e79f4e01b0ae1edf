"""Fixtures of the tests of commands."""

import pytest
from transformers import AutoModelForCausalLM

from helpers.command_line import NEW, byte_tokenizer
from redrafter.cli import main
from redrafter.measure import steps


@pytest.fixture(scope="module", autouse=True)
def _rough():
    """Let two calls make a median, and a small copy the bandwidth: nobody reads the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "MIN_TIMED_CALLS", 2)
        patch.setattr(steps, "MAX_CPU_SECONDS", 0.0)
        patch.setattr(steps, "CPU_BUFFER_BYTES", 1 << 20)
        yield


@pytest.fixture
def generate(folder, capsys):
    """Return a function that runs `redrafter generate` on the merged checkpoint and returns its stdout and stderr."""

    def run(*args: str) -> tuple[str, str]:
        assert main(["generate", "--model", str(folder / "merged"), "--max-new-tokens", str(NEW), *args]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def expected(folder):
    """Return a function that decodes what `model.generate` generates from a prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "base"), byte_tokenizer()

    def text(prompt: str, *, templated: bool = False, **kwargs) -> str:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not templated).input_ids
        out = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | kwargs)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return text
