"""What tests need to take steps by themselves."""

import torch

from helpers.models import VOCAB, assert_close_by_scale
from redrafter.drafting.proposer import State
from redrafter.model.forward_batch import ForwardBatch, Prompts
from redrafter.scheduler.draft_reader import read_drafts
from redrafter.step import draw_first_tokens
from redrafter.tree.token_tree import tree_of

__all__ = ["grown_and_whole", "prefill", "read_prompts", "verify"]


def verify(target, tree, length, cache, logits_index=None, **how):
    """Return the logits and hidden states of trees."""
    output = target.verify(ForwardBatch(tree, length, cache, logits_index, **how))
    return output.logits, output.hidden


def read_prompts(target, tokens, ends, cache, *, starts=None, max_tokens=None, show=None, **how):
    """Read prompts, and return the logits and hidden states at their last tokens."""
    starts = [0] * len(tokens) if starts is None else starts.tolist()
    return target.prefill(Prompts(tokens, starts, ends.tolist(), cache, **how), max_tokens=max_tokens, show=show)


def prefill(tokens, length, target, cache, sampler, draft_model=None, draft_cache=None) -> State:
    """Read prompts into the caches of a target and of what drafts, and return the state before the first step."""
    prompts = Prompts(tokens, [0] * len(tokens), length.tolist(), cache)
    if draft_model is not None:
        read_drafts(prompts, draft_model, draft_cache)
    logits, hidden = target.prefill(prompts)
    return draw_first_tokens(tokens, length, logits, hidden, window=cache.window, sampler=sampler)[0]


@torch.inference_mode()
def grown_and_whole(target, new_cache):
    """Return logits and hidden states of three trees, verified level by level and as a whole."""
    prompts, length = (torch.arange(33).view(3, 11) * 7 + 11) % VOCAB, torch.tensor([11, 4, 9])
    parents = [[0, 0, 0, 0, 1, 1, 3, 4, 6, 6], [0, 0, 0, 0, 2, 1, 2, 6, 4, 4], [0, 0, 0, 0, 3, 3, 3, 5, 4, 4]]
    parents, depth = torch.tensor(parents), torch.tensor([0, 1, 1, 1, 2, 2, 2, 3, 3, 3]).expand(3, 10)
    tokens = (torch.arange(30).view(3, 10) * 5 + 3) % VOCAB
    whole, results = tree_of(tokens, parents, depth, 3), []
    for levels in ([1, 4, 7, 10], [10]):
        cache, parts = new_cache(), []
        read_prompts(target, prompts, length, cache)
        for start, end in zip([0, *levels], levels, strict=False):
            grown = tree_of(tokens[:, :end], parents[:, :end], depth[:, :end], int(depth[0, end - 1]))
            tree = whole if len(levels) == 1 else grown.last_level(end - start)
            parts.append(verify(target, tree, length, cache))
            one = torch.tensor([end - start - 1, 0, (end - start) // 2])  # the head at one of the new nodes
            for some, all_of in zip(verify(target, tree, length, cache, logits_index=one), parts[-1], strict=True):
                assert_close_by_scale(some[:, 0], all_of[torch.arange(3), one], 2e-6)
        results.append([torch.cat(each, dim=1) for each in zip(*parts, strict=True)])
    return results
