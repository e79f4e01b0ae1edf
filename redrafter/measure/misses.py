"""Explain the acceptance of drafts (`--explain`): why they were missed, under which conditions, and what to type."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from redrafter.data.documents import encode_documents
from redrafter.data.rows import read_rows
from redrafter.data.windows import Windows
from redrafter.drafting.text_drafters import ReplayableDrafter
from redrafter.errors import ArgumentError
from redrafter.measure.decode import Texts
from redrafter.measure.replay import (
    Positions,
    count_accepted,
    group_texts,
    measure_positions,
    pending_positions,
    read_positions,
    replay,
    steps_taken,
)
from redrafter.measure.table import format_table
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.tree.beam_search import Candidates
from redrafter.tree.sizes import TreeShape

# Lower bounds of groups of drafts, by the base's probability of its own token and by the tokens before a draft.
PROBABILITIES = {"the base gave its token less than 0.5": 0.0, "0.5 to 0.9": 0.5, "0.9 or more": 0.9}
CONTEXTS = {"after up to 256 tokens": 0, "up to 512": 257, "up to 1024": 513, "up to 2048": 1025, "up to 8192": 2049}
CONTEXTS |= {"more than 8192": 8193}
NEAR = 2  # a rank below this multiple of the beams is a near miss
TRAINING_TEXTS = 64  # maximum number of rows of the data to read, and of their windows to measure
WINDOW = 512  # tokens of these windows
NAMED_SHARE = 0.1  # minimum fraction of all misses for a class to be mentioned
DEEPER_SHARE = 0.25  # if more of the steps accept all drafts, deeper drafts are suggested
BETTER = 1.1  # smaller ratios count as equal
BETTER_GUESSES = 0.05  # smaller differences of the fraction of correct guesses count as equal
MIN_DRAFTS = 100  # minimum size of a group whose acceptance is compared
MIN_PROMPTS = 30  # fewest from which a cause is concluded
NOT_THE_CAUSE = "it is not the cause"
TRAIN = "redrafter regenerate --data {data} --output {output} ..., redrafter train --data {output} ..."


class Outcome(IntEnum):
    """The reason that ended a step: a miss of one of four classes, the end of the draft, or the end of the text."""

    OUTSIDE_HEAD = 0
    NEAR_MISS = 1
    WRONG_GUESS = 2
    NODE_BUDGET = 3
    ALL_ACCEPTED = 4
    TEXT_ENDED = 5


MISSES = {outcome.name.lower().replace("_", " "): outcome for outcome in Outcome if outcome < Outcome.ALL_ACCEPTED}


@dataclass(frozen=True)
class Steps:
    """S steps of speculative decoding on texts."""

    text: Tensor  # index of each step's text, `[S]` int64
    pending: Tensor  # position of its pending token in the text, `[S]` int64
    left: Tensor  # number of tokens that follow the pending one, `[S]` int64
    accepted: Tensor  # accepted drafts, `[S]` int64
    searched: Tensor  # drafts that would be accepted if all nodes of the search were verified, `[S]` int64
    # Rank of the token that follows the accepted drafts in the drafter's scores: 0 for the highest score, -1 outside of
    # the drafter's vocabulary; `[S]` int64.
    rank: Tensor

    def classify(self, beams: int, depth: int) -> Tensor:
        """Return the `Outcome` of each step, `[S]` int64. Later conditions override earlier ones."""
        outcome = torch.full_like(self.rank, Outcome.WRONG_GUESS)
        outcome[self.rank < NEAR * beams] = Outcome.NEAR_MISS
        outcome[self.searched > self.accepted] = Outcome.NODE_BUDGET
        outcome[self.rank < 0] = Outcome.OUTSIDE_HEAD
        outcome[self.accepted == self.left] = Outcome.TEXT_ENDED
        outcome[self.accepted == depth] = Outcome.ALL_ACCEPTED
        return outcome

    def tried(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return the step of each of the D drafts that the steps tried, and its depth from 0, `[D]` int64 each.

        Tried are the accepted ones and the first rejected one, but none past the end of a text.
        """
        count = (self.accepted + 1).minimum(self.left).clamp(max=depth)  # [S]
        step = torch.arange(len(count)).repeat_interleave(count)  # [D]
        return step, torch.arange(len(step)) - (count.cumsum(0) - count)[step]


def explain(
    drafter: ReplayableDrafter, target: Target, texts: Texts, shape: TreeShape, categories: Mapping[str, int]
) -> dict[str, Any]:
    """Explain the acceptance of a tree on texts, as JSON has it; `categories` counts the texts of each, in order.

    `groups` counts the drafts that were tried, the accepted ones and the missed ones of each class, by the draft's
    depth, the base's certainty, the context and the category.
    """
    steps = trace_steps(drafter, target, texts, shape)
    outcome = steps.classify(shape.beams, shape.depth)
    step, depth = steps.tried(shape.depth)
    position = steps.pending[step] + 1 + depth  # equals the number of preceding tokens
    lengths = torch.tensor([len(text) for text in texts.tokens])
    probability = torch.cat(base_probabilities(target, texts))[
        (lengths.cumsum(0) - lengths)[steps.text[step]] + position
    ]
    sizes = torch.tensor(list(categories.values()))
    category = torch.arange(len(sizes)).repeat_interleave(sizes)[steps.text[step]]
    hit = depth < steps.accepted[step]
    groups: dict[str, dict[str, int]] = {}

    def count(names: Iterable[str], index: Tensor) -> None:
        for number, name in enumerate(names):
            chosen = index == number
            missed = outcome[step[chosen & ~hit]]
            found = {"tried": int(chosen.sum()), "accepted": int((chosen & hit).sum())}
            groups[name] = found | {miss: int((missed == kind).sum()) for miss, kind in MISSES.items()}

    count(["all drafts"], torch.zeros_like(step))
    count([f"draft {number + 1}" for number in range(shape.depth)], depth)
    for names, value in ((PROBABILITIES, probability), (CONTEXTS, position)):
        bounds = torch.tensor([*names.values()][1:], dtype=value.dtype)
        count(names, torch.bucketize(value, bounds, right=True))
    count(categories if len(categories) > 1 else (), category)
    # A step at the end of a text cannot emit more tokens than are left.
    emitted = (steps.accepted + 1).minimum(steps.left)  # [S]
    by_text = [steps.text.bincount(weights, len(texts.tokens)).tolist() for weights in (emitted.double(), None)]
    return {
        "temperature": texts.temperature,
        "steps": len(outcome),
        "all_accepted": int((outcome == Outcome.ALL_ACCEPTED).sum()),
        "text_ended": int((outcome == Outcome.TEXT_ENDED).sum()),
        "tokens_per_step": float(emitted.double().mean()) if len(outcome) else None,
        "margin": mean_margin(*by_text),
        "groups": groups,
        "first_guesses": first_guess_share(drafter, target, texts),
    }


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


def measure_form(
    drafter: ReplayableDrafter, target: Target, texts: Texts, shape: TreeShape
) -> tuple[float | None, float | None]:
    """Return tokens per step on texts, and half of the confidence interval of that; None without steps."""
    stats = replay(drafter, target, texts, [shape])[0]
    steps = sum(each.steps for each in stats)
    mean = sum(each.emitted for each in stats) / steps if steps else None
    return mean, mean_margin([each.emitted for each in stats], [each.steps for each in stats])


@torch.inference_mode()
def trace_steps(drafter: ReplayableDrafter, target: Target, texts: Texts, shape: TreeShape) -> Steps:
    """Return the steps that `replay` counts, with the data that classify the first missed draft of each.

    The drafter must be in eval mode, on the target's device and in its dtype.
    """
    # The second shape verifies all nodes: if it accepts more, the node budget caused the miss.
    shapes, rows = [shape, replace(shape, node_budget=shape.lattice)], list[list[int]]()

    def trace(at: Positions) -> Tensor:
        accepted = count_accepted(drafter, target, at, shapes)[0]  # [A, 2]
        # A step that accepted all drafts has no missed one: `classify` overrides the class that its rank gives.
        missed = accepted[:, :1].clamp(max=shape.depth - 1)
        return torch.cat([accepted, _ranks(drafter, target, at).gather(1, missed)], dim=1)  # [A, 3]

    for index, found in measure_positions(drafter, target, texts, [shape], trace):
        pending = pending_positions(texts, index)
        for step in steps_taken(found[:, 0].tolist()):
            rows.append([index, pending[step], len(pending) - step, *found[step].tolist()])
    return Steps(*torch.tensor(rows, dtype=torch.long).reshape(-1, len(fields(Steps))).unbind(1))


@torch.inference_mode()
def first_guess_share(drafter: ReplayableDrafter, target: Target, texts: Texts) -> float | None:
    """Return how often the drafter's top token equals the text's, given the tokens before it; None without positions.

    Every position after the prompts counts, without shared noise, so texts of any origin can be compared.
    """
    # Greedy texts need no noise, so this removes it from the search.
    plain, right, count = replace(texts, temperature=0.0, seeds=None), 0, 0
    for group in group_texts(plain, target.vocab_size):
        for part in read_positions(drafter, target, plain, group, [TreeShape(1, 1, None)]):
            count += int((part.state.tokens[:, 1] >= 0).sum())
            right += int((_ranks(drafter, target, part) == 0).sum())
    return right / count if count else None


@torch.inference_mode()
def base_probabilities(target: Target, texts: Texts) -> list[Tensor]:
    """Compute the base's probability of each token of each text at the texts' temperature, or 1 for greedy texts.

    Returns `[T]` float32 for each text of T tokens; 1 for its first token.
    """
    found: dict[int, Tensor] = {}
    with Teacher(target.model) as teacher:
        # Logits of a whole text are kept at once, so texts are grouped by the memory that these take.
        for group in group_texts(texts, target.vocab_size):
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


def _ranks(drafter: ReplayableDrafter, target: Target, at: Positions) -> Tensor:
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
        if isinstance(scores, Candidates):
            scores = scores.spread(drafter.lm_head.out_features)
        assert isinstance(scores, Tensor), "an evaluation runs in one process"
        own = scores[:, 0].gather(1, label[:, k + 1].clamp(min=0)[:, None])
        ranks.append((scores[:, 0] > own).sum(dim=1).where(label[:, k + 1] >= 0, -1))
    return torch.stack(ranks, dim=1)


def read_training_texts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    context: int | None,
    seed: int,
    temperatures: Collection[float],
) -> tuple[Texts, bool]:
    """Load some texts of a drafter's training data with the loaders of training.

    A drafter predicts greedy texts better than sampled ones, so only texts of equal temperature are comparable. Of rows
    that record it, such as rows of `redrafter regenerate`, only the highest one in `temperatures` is used.
    Other rows were not generated by a model; they are compared with texts at the temperature closest to 1.

    Args:
        files: Sources of the data.
        tokenizer: Tokenizer of the base.
        vocabulary: Ids that the base knows.
        context: Tokens of the base's context; None for no limit.
        seed: Seed of the choice of texts.
        temperatures: Temperatures of the base's texts that the data are compared with.

    Returns:
        Each trained part of a text, with everything before it as prompt, and with the temperature to compare with; and
        whether the rows record that temperature.

    Raises:
        ArgumentError: There is no row to train on, or none of these temperatures.
        CheckpointError: A row cannot be read or has no trained tokens.
        MismatchError: A row has ids of another tokenizer.
    """
    rows = [row for row in read_rows(files) if row.split in (None, "train")]
    if not rows:
        raise ArgumentError(f"--data {' '.join(files)}: no row to train on; rows of split val and test are not")
    recorded = {row.temperature for row in rows if row.temperature is not None}
    comparable = recorded & set(temperatures)
    if recorded and not comparable:
        raise ArgumentError(
            f"--data {' '.join(files)} was written at temperature {' or '.join(f'{t:g}' for t in sorted(recorded))}, "
            f"and compares with texts of the same one: add it to --temperatures {','.join(map(str, temperatures))}"
        )
    temperature = max(comparable) if recorded else min(temperatures, key=lambda value: abs(value - 1))
    rows = [row for row in rows if not recorded or row.temperature == temperature]
    # A separate generator, so that other random draws do not change the choice.
    choice = random.Random(seed)
    choice.shuffle(rows)
    length = WINDOW if context is None else min(WINDOW, context)
    windows = Windows(encode_documents(rows[:TRAINING_TEXTS], tokenizer), length, tokenizer.bos_token_id, pack=False)
    windows.check(vocabulary, context)
    tokens, prompt_lengths = list[list[int]](), list[int]()
    for index in choice.sample(range(len(windows)), min(TRAINING_TEXTS, len(windows))):
        span = slice(int(windows.offsets[index]), int(windows.offsets[index + 1]))
        ids, end = windows.tokens[span].tolist(), 0
        # Each answer of a conversation is one text; what precedes it is its prompt.
        for learnt, run in groupby(windows.mask[span].tolist()):
            begin, end = end, end + len(list(run))
            if learnt:
                tokens.append(ids[:end])
                prompt_lengths.append(begin)
    return Texts(tokens, prompt_lengths, [False] * len(tokens), temperature), bool(recorded)


@dataclass(frozen=True)
class Compared:
    """Texts that an explanation is compared with."""

    data: Sequence[str] = ()  # files of the drafter's training data
    first_guesses: float | None = None  # as `first_guess_share` on them
    temperature: float = 0.0  # of the base's texts that they compare with
    recorded: bool = False  # whether their rows record that temperature
    # Tokens per step, and its margin, on greedy texts after prompts as plain text and in the chat template; how many.
    plain: tuple[float | None, float | None] | None = None
    template: tuple[float | None, float | None] | None = None
    forms: int = 0


def advise(
    found: Sequence[Mapping[str, Any]], shape: TreeShape, head: int, vocabulary: int, prompts: int, compared: Compared
) -> Iterator[str]:
    """Yield lines with findings and suggested commands, for the highest temperature of `explain`'s results.

    `shape` is the explained tree, `head` the size of the drafter's vocabulary, of the base's `vocabulary`.
    """
    last = max(found, key=lambda one: float(one["temperature"]))
    every = last["groups"]["all drafts"]
    missed, temperature = every["tried"] - every["accepted"], last["temperature"]
    beams, depth, lattice = shape.beams, shape.depth, shape.lattice
    causes = {
        "outside head": f"tokens that the drafter's head lacks: it has {head} of {vocabulary}: redrafter train "
        f"--draft-vocab-size {min(2 * head, vocabulary)} ...",
        "near miss": f"just below the beams: redrafter evaluate --shapes {2 * beams}x{depth}, and if that pays "
        f"--num-beams {2 * beams}",
        "wrong guess": "far from the beams, which only training mends: "
        + TRAIN.format(data="prompts.jsonl", output="own.jsonl"),
        "node budget": f"drafted and not verified, for {shape.node_budget} of {lattice} nodes are: --node-budget "
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

    def conclude(text: str, count: int = prompts) -> str:
        return text if count >= MIN_PROMPTS else f"{count} prompts are too few to conclude, give {MIN_PROMPTS} or more"

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
    yield f"training data: {_compare_data(found, compared, conclude)}"
    yield f"chat template: {_compare_forms(compared, conclude)}"
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


def _compare_data(found: Sequence[Mapping[str, Any]], compared: Compared, conclude: Callable[[str], str]) -> str:
    """Compare the drafter's guesses on its training data with those on the base's text of the same temperature."""
    if not compared.data:
        return "not compared; to do so: redrafter evaluate --explain --data FILE"
    # Only texts of the same temperature compare: sampled tokens are harder to guess than greedy ones.
    own = next(one["first_guesses"] for one in found if one["temperature"] == compared.temperature)
    trained, both = compared.first_guesses, ", both" if compared.recorded else ""
    if trained is None or own is None:
        return "no text is long enough to compare; give another file: --data FILE"
    shown = f"first guesses are right for {trained:.0%} of the data and {own:.0%} of the base's own text{both} at "
    shown += f"temperature {compared.temperature:g}"
    if trained < own + BETTER_GUESSES:
        return f"{shown}; {conclude(NOT_THE_CAUSE)}"
    # An output must not be one of the files that the commands read.
    names = ["own.jsonl", *(f"own-{number}.jsonl" for number in range(2, len(compared.data) + 2))]
    output = next(name for name in names if name not in compared.data)
    if not compared.recorded:
        return f"{shown}; {conclude(TRAIN.format(data=' '.join(compared.data), output=output))}"
    more = f"redrafter regenerate --data prompts.jsonl --output {output} ..., redrafter train --data"
    mend = f"it memorised these rows, so add others: {more} {' '.join(compared.data)} {output} ..."
    return f"{shown}; {conclude(mend)}"


def _compare_forms(compared: Compared, conclude: Callable[[str, int], str]) -> str:
    """Compare the acceptance after plain prompts with that after the same prompts in the chat template."""
    if compared.plain is None or compared.template is None:
        return "not compared: the base has none, or no prompt fits with it"
    (without, margin), (within, other) = compared.plain, compared.template
    if without is None or within is None:
        return "not compared: the base ended all texts at once; to measure others: --prompts FILE"
    mend = NOT_THE_CAUSE
    if abs(within - without) >= (margin or 0.0) + (other or 0.0):
        if within > BETTER * without:
            mend = "send chats, such as rows of messages or redrafter generate --chat"
        elif without > BETTER * within:
            mend = "the drafter does not know chats: redrafter train --data chats.jsonl ..."
    return (
        f"{_interval(without, margin)} tokens per step after plain prompts, {_interval(within, other)} after the same "
        f"as a user's turn; {conclude(mend, compared.forms)}"
    )
