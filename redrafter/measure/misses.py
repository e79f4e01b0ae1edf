"""Explain the acceptance of drafts (`--explain`): why they were missed, under which conditions, and what to type."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafting.text_drafters import TrainableDrafter
from redrafter.measure import replay
from redrafter.measure.decode import Texts
from redrafter.measure.table import format_table
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.tree.sizes import TreeShape

# Lower bounds of groups of drafts, by the base's probability of its own token and by the tokens before a draft.
PROBABILITIES = {"the base gave its token less than 0.5": 0.0, "0.5 to 0.9": 0.5, "0.9 or more": 0.9}
CONTEXTS = {"after up to 256 tokens": 0, "up to 512": 257, "up to 1024": 513, "up to 2048": 1025, "up to 8192": 2049}
CONTEXTS |= {"more than 8192": 8193}
NEAR = 2  # a rank below this multiple of the beams is a near miss
NAMED_SHARE = 0.1  # minimum fraction of all misses for a class to be mentioned
DEEPER_SHARE = 0.25  # if more of the steps accept all drafts, deeper drafts are suggested
BETTER = 1.1  # smaller ratios count as equal
MIN_DRAFTS = 100  # minimum size of a group whose acceptance is compared
MIN_PROMPTS = 30  # fewest from which a cause is concluded
NOT_THE_CAUSE = "it is not the cause"


# Why a step ended: a miss of one of four classes, the end of the draft, or the end of the text.
MISSES = OUTSIDE_HEAD, NEAR_MISS, WRONG_GUESS, NODE_BUDGET = "outside head", "near miss", "wrong guess", "node budget"
ALL_ACCEPTED, TEXT_ENDED = "all accepted", "text ended"


class Step(NamedTuple):
    """A step of speculative decoding on a text."""

    text: int  # index of the text
    pending: int  # position of the pending token in the text
    left: int  # number of tokens that follow the pending one
    accepted: int  # accepted drafts
    searched: int  # drafts that would be accepted if all nodes of the search were verified
    # Rank of the token that follows the accepted drafts in the drafter's scores: 0 for the highest score, -1 outside of
    # the drafter's vocabulary.
    rank: int

    def outcome(self, beams: int, depth: int) -> str:
        """Return why the step ended, with a search of so many beams and drafts."""
        if self.accepted == depth:
            return ALL_ACCEPTED
        if self.accepted == self.left:
            return TEXT_ENDED
        if self.rank < 0:
            return OUTSIDE_HEAD
        if self.searched > self.accepted:
            return NODE_BUDGET
        return NEAR_MISS if self.rank < NEAR * beams else WRONG_GUESS


def explain(
    drafter: TrainableDrafter, target: Target, texts: Texts, shape: TreeShape, categories: Mapping[str, int]
) -> dict[str, Any]:
    """Explain the acceptance of a tree on texts, as JSON has it; `categories` counts the texts of each, in order.

    `groups` counts the drafts that were tried, the accepted ones and the missed ones of each class, by the draft's
    depth, the base's certainty, the context and the category.
    """
    steps, probabilities = trace_steps(drafter, target, texts, shape), base_probabilities(target, texts)
    category_of = [name for name, count in categories.items() for _ in range(count)]
    names = ["all drafts", *(f"draft {number + 1}" for number in range(shape.depth)), *PROBABILITIES, *CONTEXTS]
    names += categories if len(categories) > 1 else ()
    groups = {name: dict.fromkeys(("tried", "accepted", *MISSES), 0) for name in names}
    outcomes, emitted, taken = Counter[str](), [0] * len(texts.tokens), [0] * len(texts.tokens)
    for step in steps:
        outcome = step.outcome(shape.beams, shape.depth)
        outcomes[outcome] += 1
        taken[step.text] += 1
        # A step at the end of a text cannot emit more tokens than are left.
        emitted[step.text] += min(step.accepted + 1, step.left)
        # Tried are the accepted drafts and the first rejected one, but none past the end of a text.
        for depth in range(min(step.accepted + 1, step.left, shape.depth)):
            position = step.pending + 1 + depth  # equals the number of preceding tokens
            certainty = _group_of(float(probabilities[step.text][position]), PROBABILITIES)
            names = ["all drafts", f"draft {depth + 1}", certainty, _group_of(position, CONTEXTS)]
            for name in (*names, category_of[step.text]):
                if name in groups:
                    groups[name]["tried"] += 1
                    groups[name]["accepted" if depth < step.accepted else outcome] += 1
    counts = {"steps": len(steps), "all_accepted": outcomes[ALL_ACCEPTED], "text_ended": outcomes[TEXT_ENDED]}
    rate = {"tokens_per_step": sum(emitted) / len(steps) if steps else None, "margin": mean_margin(emitted, taken)}
    return {"temperature": texts.temperature} | counts | rate | {"groups": groups}


def _group_of(value: float, groups: Mapping[str, float]) -> str:
    """Return the last of some groups, by their lower bounds, that a value is in."""
    return [*groups][bisect_right([*groups.values()], value) - 1]


def format_misses(found: Mapping[str, Any], tree: str) -> Iterator[str]:
    """Yield the lines of the table of an explanation; groups without drafts have no row."""
    yield f"why drafts were missed: {tree}, temperature {found['temperature']:g}"
    cells = (
        (name, group["tried"], group["accepted"] / group["tried"], *(group[miss] for miss in MISSES))
        for name, group in found["groups"].items()
        if group["tried"]
    )
    yield from format_table(["", "tried", "accepted", *MISSES], cells)
    yield f"{found['all_accepted']} of {found['steps']} steps accepted all drafts, {found['text_ended']} ended a text"


def mean_margin(sums: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return half of the 95 % confidence interval of `sum(sums) / sum(counts)`; None for fewer than two texts.

    The steps of one text are alike, so texts are the independent samples; entry i is of text i.
    """
    total, texts = sum(counts), len(counts)
    if texts < 2 or not total:
        return None
    mean = sum(sums) / total
    variance = sum((part - mean * count) ** 2 for part, count in zip(sums, counts, strict=True)) * texts / (texts - 1)
    return 1.96 * variance**0.5 / total


@torch.inference_mode()
def trace_steps(drafter: TrainableDrafter, target: Target, texts: Texts, shape: TreeShape) -> list[Step]:
    """Return the steps that `replay` counts, with the data that classify the first missed draft of each.

    The drafter must be in eval mode, on the target's device and in its dtype.
    """
    # The second shape verifies all nodes: if it accepts more, the node budget caused the miss.
    shapes, steps = [shape, replace(shape, node_budget=shape.lattice)], list[Step]()

    def trace(at: replay.Positions) -> Tensor:
        accepted = replay.count_accepted(drafter, target, at, shapes)[0]  # [A, 2]
        # A step that accepted all drafts has no missed one, and its outcome does not depend on its rank.
        missed = accepted[:, :1].clamp(max=shape.depth - 1)
        return torch.cat([accepted, _ranks(drafter, target, at).gather(1, missed)], dim=1)  # [A, 3]

    for index, found in replay.measure_positions(drafter, target, texts, [shape], trace):
        pending = replay.pending_positions(texts, index)
        for step in replay.steps_taken(found[:, 0].tolist()):
            steps.append(Step(index, pending[step], len(pending) - step, *found[step].tolist()))
    return steps


@torch.inference_mode()
def base_probabilities(target: Target, texts: Texts) -> list[Tensor]:
    """Compute the base's probability of each token of each text at the texts' temperature, or 1 for greedy texts.

    Returns `[T]` float32 for each text of T tokens; 1 for its first token.
    """
    found: dict[int, Tensor] = {}
    with Teacher(target.model) as teacher:
        # Logits of a whole text are kept at once, so texts are grouped by the memory that these take.
        for group in replay.group_texts(texts, target.vocab_size):
            tokens = pad_sequence([torch.tensor(texts.tokens[i]) for i in group], batch_first=True)  # [B, T]
            logits = teacher.read_batch(tokens.to(target.device)).logits  # [B, T, V]
            for row, index in enumerate(group):
                length = len(texts.tokens[index])
                # The likelihood at the temperature at which the text was sampled; greedy texts count as T=1.
                scores = logits[row, : length - 1].float() / (texts.temperature or 1.0)
                own = tokens[row, 1:length, None].to(target.device)
                probability = scores.softmax(dim=-1).gather(1, own)[:, 0].cpu()
                # The first token has no prediction.
                found[index] = torch.cat([torch.ones(1), probability])
    return [found[index] for index in range(len(texts.tokens))]


def _ranks(drafter: TrainableDrafter, target: Target, at: replay.Positions) -> Tensor:
    """Rank the text's own tokens in the drafter's scores during search, `[A, K]` int64: the number of higher scores.

    -1 marks tokens outside the drafter's vocabulary and positions past the end of the text.
    """
    tokens, ranks = at.state.tokens[:, :-1], list[Tensor]()  # [A, K+1]
    # Tokens outside of the drafter's head have no rank.
    label = drafter.index_ids()[tokens.clamp(min=0)].where(tokens >= 0, -1)
    depth = tokens.shape[1] - 1
    # A single beam that follows the text itself: ranks are relative to the correct prefix.
    proposer = drafter.proposer(target, 1, depth, 1 + depth, None, False)
    expand = proposer.scores(at.state, at.sampler, at.noise, at.context)
    for k in range(depth):
        scores = expand(k, tokens[:, k : k + 1].clamp(min=0), torch.zeros_like(tokens[:, :1]))
        assert isinstance(scores, Tensor), "an evaluation runs in one process"
        own = scores[:, 0].gather(1, label[:, k + 1].clamp(min=0)[:, None])
        ranks.append((scores[:, 0] > own).sum(dim=1).where(label[:, k + 1] >= 0, -1))
    return torch.stack(ranks, dim=1)


def advise(found: list[dict[str, Any]], shape: TreeShape, head: int, vocabulary: int, prompts: int) -> Iterator[str]:
    """Yield lines with findings and suggested commands, for the highest temperature of `explain`'s results.

    `shape` is the explained tree, `head` the size of the drafter's vocabulary, of the base's `vocabulary`. Below
    `MIN_PROMPTS` prompts no cause is concluded.
    """
    last = max(found, key=lambda one: float(one["temperature"]))
    every = last["groups"]["all drafts"]
    missed, temperature = every["tried"] - every["accepted"], last["temperature"]
    beams, depth, lattice = shape.beams, shape.depth, shape.lattice
    causes = {
        OUTSIDE_HEAD: f"tokens that the drafter's head lacks: it has {head} of {vocabulary}: redrafter train "
        f"--draft-vocab-size {min(2 * head, vocabulary)} ...",
        NEAR_MISS: f"just below the beams: redrafter evaluate --shapes {2 * beams}x{depth}, and if that pays "
        f"--num-beams {2 * beams}",
        WRONG_GUESS: "far from the beams, which only training mends: redrafter regenerate --data prompts.jsonl "
        "--output own.jsonl ..., redrafter train --data own.jsonl ...",
        NODE_BUDGET: f"drafted and not verified, for {shape.node_budget} of {lattice} nodes are: --node-budget "
        f"{lattice}",
    }
    # The largest cause first.
    for name in sorted(causes, key=lambda name: -int(every[name])):
        if every[name] and every[name] >= NAMED_SHARE * missed:
            yield f"{every[name] / missed:.0%} of the misses at temperature {temperature:g} are {causes[name]}"
    if last["all_accepted"] and last["all_accepted"] >= DEEPER_SHARE * last["steps"]:
        yield (
            f"{last['all_accepted'] / last['steps']:.0%} of the steps accepted all {depth} drafts: redrafter evaluate "
            f"--shapes {beams}x{depth + 3}, and if that pays --draft-len-per-beam {depth + 3}"
        )

    def conclude(text: str) -> str:
        few = f"{prompts} prompts are too few to conclude, give {MIN_PROMPTS} or more"
        return text if prompts >= MIN_PROMPTS else few

    greedy = next((one for one in found if one["temperature"] == 0 and one["steps"]), None)
    if greedy is None or not temperature or not last["steps"]:
        yield "temperature: only one was measured; to compare: redrafter evaluate --temperatures 0,1"
    else:
        both = (_interval(one["tokens_per_step"], one["margin"]) for one in (greedy, last))
        alike = greedy["tokens_per_step"] < BETTER * last["tokens_per_step"]
        mend = NOT_THE_CAUSE if alike else f"sampled tokens are harder to guess: --temperature {temperature / 2:g}"
        yield f"temperature: greedy {next(both)} tokens per step, at {temperature:g} {next(both)}; {conclude(mend)}"
    if missed:
        unsure = last["groups"][next(iter(PROBABILITIES))]
        drafts, misses = unsure["tried"] / every["tried"], (unsure["tried"] - unsure["accepted"]) / missed
        mend = "no drafter guesses such tokens well, a lower --temperature draws fewer"
        yield (
            f"certainty: the base gave its own token less than 0.5 at {drafts:.0%} of the drafts, where {misses:.0%} "
            f"of the misses are; {conclude(mend if misses > BETTER * drafts else NOT_THE_CAUSE)}"
        )
    rates = [
        (name, group["accepted"] / group["tried"])
        for name, group in last["groups"].items()
        if name in CONTEXTS and group["tried"] >= MIN_DRAFTS
    ]
    if len(rates) < 2:
        yield (
            "context: all drafts follow about the same number of tokens; to compare: redrafter evaluate "
            "--prompt-lengths 256,1024"
        )
    else:
        (short, first), (long, rate) = rates[0], rates[-1]
        mend = "redrafter train --length N ..., with N as long as the served texts"
        mend = conclude(mend if first >= BETTER * rate else NOT_THE_CAUSE)
        yield f"context: acceptance is {first:.3f} {short}, {rate:.3f} {long}; {mend}"


def _interval(mean: float, margin: float | None) -> str:
    return f"{mean:.2f}" if margin is None else f"{mean:.2f} ± {margin:.2f}"
