"""How many tokens a step would advance: what a drafter is worth, measured without generating.

Along a text that the base wrote greedily itself, what the base draws next is known at every position. So the trees that
decoding would propose can be made for all positions at once, with decoding's own code, and the steps walked afterwards.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafter import RecurrentDrafter
from redrafter.engine import Engine
from redrafter.outputs import GenerateOutput, Stats
from redrafter.proposer import RecurrentProposer
from redrafter.sampling import Sampler
from redrafter.step import Plain, State
from redrafter.target import Target
from redrafter.train.teacher import Teacher
from redrafter.verify import accept

__all__ = ["greedy_texts", "walked"]

TEXTS = 16  # texts in one forward of the base
ROWS = 1024  # positions in one call of the drafter


def greedy_texts(target: Target, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Let the base write on from each prompt. Returns the texts, prompts included, and the prompts' lengths."""
    texts = []
    for first in range(0, len(prompts), TEXTS):
        some = prompts[first : first + TEXTS]
        rows = [torch.tensor(prompt) for prompt in some]
        ids = pad_sequence(rows, batch_first=True, padding_side="left")  # [B, P]
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        out = Engine(target, Plain()).generate(
            ids, mask, do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True
        )
        assert isinstance(out, GenerateOutput) and out.stats is not None
        written = out.sequences[:, ids.shape[1] :].tolist()
        # The prefill's token is not counted as a step's.
        texts += [p + w[: 1 + row.emitted] for p, w, row in zip(some, written, out.stats.rows, strict=True)]
    return texts, [len(prompt) for prompt in prompts]


@torch.inference_mode()
def walked(
    drafter: RecurrentDrafter,
    target: Target,
    texts: list[list[int]],
    starts: list[int],
    beams: int,
    depth: int,
    nodes: int,
) -> Stats:
    """What `generate` would report, greedily, on texts that the base wrote from prompts of `starts` tokens.

    drafter: in eval mode, on the target's device and in its dtype. Returns steps, tokens_per_step, accepted_by_depth.
    """
    proposer = RecurrentProposer(drafter, target, beams, depth, min(nodes, 1 + beams * depth))
    stats = Stats(accepted_by_depth=[0] * depth)
    for first in range(0, len(texts), TEXTS):
        some, begins = texts[first : first + TEXTS], starts[first : first + TEXTS]
        accepted = iter(_accepted(proposer, target, some, begins))
        for text, start in zip(some, begins, strict=True):
            by_pending = [next(accepted) for _ in range(start, len(text) - 1)]
            pending = start  # the prefill drew this token
            while pending < len(text) - 1:
                drafts = by_pending[pending - start]
                stats.count(proposer.nodes - 1, drafts, min(drafts + 1, len(text) - 1 - pending))
                pending += drafts + 1
    return stats


def _accepted(proposer: RecurrentProposer, target: Target, texts: list[list[int]], starts: list[int]) -> list[int]:
    """Drafts accepted when token n of a text is pending, for n = start .. length - 2, text by text."""
    tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True, padding_value=-1)  # [B, T]
    with Teacher(target.model) as teacher:
        hidden, _ = teacher.read(tokens.clamp(min=0).to(target.model.device))  # [B, T, D]
    row = torch.tensor([b for b, text in enumerate(texts) for _ in range(starts[b], len(text) - 1)], dtype=torch.long)
    place = torch.tensor([n for b, text in enumerate(texts) for n in range(starts[b], len(text) - 1)], dtype=torch.long)
    ahead = pad(tokens, (0, proposer.depth + 2), value=-1)  # -1: past the end, drawn by nobody
    index = place[:, None] + torch.arange(proposer.depth + 2)
    text = ahead[row[:, None], index].to(target.model.device)  # [A, K+2]: pending, and what the base drew after it
    before = hidden[row.to(target.model.device), place.to(target.model.device) - 1]  # [A, D]
    found = [_drafts(proposer, target, *part) for part in zip(text.split(ROWS), before.split(ROWS), strict=True)]
    return torch.cat(found).tolist() if found else []


def _drafts(proposer: RecurrentProposer, target: Target, text: Tensor, hidden: Tensor) -> Tensor:
    """text: `[A, K+2]`, the pending token and the base's own after it. hidden: `[A, D]`. Returns `[A]`, drafts kept."""
    zero = torch.zeros(len(text), dtype=torch.long, device=text.device)
    state = State(text, zero, hidden, zero == 0)
    sampler = Sampler(None, (), torch.ones_like(zero, dtype=torch.float), zero, zero, zero[:0])  # greedy: no noise
    tree = proposer.propose(state, sampler, None)  # [A, N]
    return accept(tree, text.gather(1, tree.depth + 1), proposer.depth).accepted
