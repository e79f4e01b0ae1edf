"""What tests need to take steps by themselves."""

from redrafter.drafting.proposer import State
from redrafter.step import draw_first_tokens, read_prompts

__all__ = ["prefill"]


def prefill(tokens, length, target, cache, sampler, **how) -> State:
    """Read prompts as `read_prompts` does, and return the state before the first step."""
    logits, hidden = read_prompts(tokens, length, target, cache, counts=length.tolist(), **how)
    return draw_first_tokens(tokens, length, logits, hidden, cache.window, sampler)[0]
