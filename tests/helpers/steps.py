"""What tests need to take steps by themselves."""

from redrafter.drafting.proposer import State
from redrafter.model.forward_batch import ForwardBatch, Prompts
from redrafter.scheduler.prefill import read_drafts
from redrafter.step import draw_first_tokens

__all__ = ["prefill", "read_prompts", "verify"]


def verify(target, tree, length, cache, logits_index=None, **how):
    """Return the logits and hidden states of trees."""
    output = target.verify(ForwardBatch(tree, length, cache, logits_index, **how))
    return output.logits, output.hidden


def read_prompts(target, tokens, upto, cache, *, max_tokens=None, show=None, **how):
    """Read prompts, and return the logits and hidden states at their last tokens."""
    return target.prefill(Prompts(tokens, upto, cache, **how), max_tokens=max_tokens, show=show)


def prefill(tokens, length, target, cache, sampler, draft_model=None, draft_cache=None) -> State:
    """Read prompts into the caches of a target and of what drafts, and return the state before the first step."""
    prompts = Prompts(tokens, length, cache, counts=length.tolist())
    if draft_model is not None:
        read_drafts(prompts, draft_model, draft_cache)
    logits, hidden = target.prefill(prompts)
    return draw_first_tokens(tokens, length, logits, hidden, cache.window, sampler)[0]
