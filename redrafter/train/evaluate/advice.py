"""Advice on an acceptance that was explained: a line says for each cause what to type, and which numbers say so."""

from collections.abc import Iterator

from redrafter.train.evaluate.explain import Bucket, Explanation, StepCounts, TemperatureExplanation

__all__ = ["advise"]

NAMED_SHARE = 0.1  # of all misses; a class with less is not worth a line
DEEPER_SHARE = 0.25  # of all steps, which accepted all drafts: deeper drafts would pay
BETTER = 1.1  # times as good; what is closer than that counts as equal
BETTER_GUESSES = 0.05  # of all guesses; the same for shares of right guesses
MIN_DRAFTS = 100  # of a bucket whose acceptance is compared
TRAIN = "redrafter regenerate --data prompts.jsonl --output own.jsonl ..., redrafter train --data own.jsonl ..."


def advise(explanation: Explanation) -> Iterator[str]:
    """Yield lines of what was found and what to type, for the highest temperature."""
    last = max(explanation.temperatures, key=lambda one: one.temperature)
    if last.all_steps.steps:
        yield from _misses(explanation, last.all_steps, last.temperature)
    yield _temperature(explanation.temperatures)
    yield _certainty(last)
    yield _data(explanation, last)
    yield _template(explanation)
    yield _context(last.by_context)


def _misses(explanation: Explanation, counts: StepCounts, temperature: float) -> Iterator[str]:
    """Yield a line for each class that has many of the misses, and one where drafts end too soon."""
    beams, depth = explanation.beams, explanation.depth
    wider = f"{2 * beams}x{depth}"
    causes = {
        "outside_head": f"tokens that the drafter's head lacks: it has {explanation.head} of {explanation.vocabulary}: "
        f"redrafter train --draft-vocab-size {min(2 * explanation.head, explanation.vocabulary)} ...",
        "near_miss": f"just behind the beams: redrafter evaluate --shapes {wider}, and if that pays --num-beams "
        f"{2 * beams}",
        "wrong_guess": f"far from the beams, which only training mends: {TRAIN}",
        "node_budget": f"drafted and not verified, for {explanation.nodes} of {explanation.lattice} nodes are: "
        f"redrafter tune, or --node-budget {explanation.lattice}",
    }
    total = sum(counts.missed.values())
    for name, count in sorted(counts.missed.items(), key=lambda item: -item[1]):
        if count >= NAMED_SHARE * total and count:
            yield f"{count / total:.0%} of the misses at temperature {temperature:g} are {causes[name]}"
    if counts.all_accepted >= DEEPER_SHARE * counts.steps:
        yield (
            f"{counts.all_accepted / counts.steps:.0%} of the steps accepted all {depth} drafts: redrafter evaluate "
            f"--shapes {beams}x{depth + 3}, and if that pays --draft-len-per-beam {depth + 3}"
        )


def _temperature(measured: list[TemperatureExplanation]) -> str:
    known = [one for one in measured if one.tokens_per_step is not None]
    greedy = [one.tokens_per_step for one in known if one.temperature == 0]
    others = [one for one in known if one.temperature > 0]
    if not greedy or not others:
        return "temperature: only greedy texts were measured; to compare: redrafter evaluate --temperatures 0,1"
    hottest = max(others, key=lambda one: one.temperature)
    found = f"greedy {greedy[0]:.2f} tokens per step, at {hottest.temperature:g} {hottest.tokens_per_step:.2f}"
    if (greedy[0] or 0) < BETTER * (hottest.tokens_per_step or 0):
        return f"temperature: {found}; it is not the cause"
    return f"temperature: {found}; what is drawn is harder to guess: --temperature {hottest.temperature / 2:g}"


def _certainty(result: TemperatureExplanation) -> str:
    """Say whether the misses are where the base itself was unsure."""
    unsure, drafts = result.by_probability[0], sum(one.drafts for one in result.by_probability)
    missed = sum(one.drafts - one.accepted for one in result.by_probability)
    if not missed:
        return "certainty: no draft was missed"
    share = (unsure.drafts - unsure.accepted) / missed
    found = f"the base gave its own token less than 0.5 at {unsure.drafts / drafts:.0%} of the drafts"
    if share * drafts > BETTER * unsure.drafts:
        return (
            f"certainty: {found}, where {share:.0%} of the misses are; no drafter guesses such tokens well, a lower "
            "--temperature draws fewer"
        )
    return f"certainty: {found}, where {share:.0%} of the misses are; it is not the cause"


def _data(explanation: Explanation, result: TemperatureExplanation) -> str:
    """Say whether the drafter guesses the text that it was trained on better than the base's own."""
    if explanation.best_guess_on_data is None:
        return "training data: not compared; to do so: redrafter evaluate --explain --data FILE"
    trained, own = explanation.best_guess_on_data[0], result.best_guess[0]
    if trained is None or own is None:
        return "training data: no text is long enough to compare; give another file: --data FILE"
    found = f"first guesses are right for {trained:.0%} of the data and {own:.0%} of the base's own text"
    if trained < own + BETTER_GUESSES:
        return f"training data: {found}; it is not the cause"
    files = " ".join(explanation.data)
    return (
        f"training data: {found}: redrafter regenerate --data {files} --output own.jsonl ..., "
        "redrafter train --data own.jsonl ..."
    )


def _template(explanation: Explanation) -> str:
    plain, template = explanation.plain, explanation.template
    if plain is None or template is None:
        return "chat template: not compared: the base has none, or no prompt fits with it"
    per_step = plain.tokens_per_step, template.tokens_per_step
    if per_step[0] is None or per_step[1] is None:
        return "chat template: not compared: the base ended all texts at once; to measure others: --prompts FILE"
    found = f"{per_step[0]:.2f} tokens per step after plain prompts, {per_step[1]:.2f} after the same as a user's turn"
    if per_step[1] > BETTER * per_step[0]:
        return f"chat template: {found}: send chats, such as rows of messages or redrafter generate --chat-template"
    if per_step[0] > BETTER * per_step[1]:
        return f"chat template: {found}; the drafter does not know chats: redrafter train --data chats.jsonl ..."
    return f"chat template: {found}; it is not the cause"


def _context(buckets: list[Bucket]) -> str:
    """Compare the acceptance behind the shortest contexts with that behind the longest ones."""
    rates = [(one.name, one.acceptance) for one in buckets if one.drafts >= MIN_DRAFTS and one.acceptance is not None]
    if len(rates) < 2:
        return (
            "context: all drafts are behind about as many tokens; to compare: redrafter evaluate "
            "--prompt-lengths 256,1024"
        )
    (short, first), (long, last) = rates[0], rates[-1]
    found = f"acceptance is {first:.3f} behind {short} tokens, {last:.3f} behind {long}"
    if first < BETTER * last:
        return f"context: {found}; it is not the cause"
    return f"context: {found}: redrafter train --length N ..., with N as long as what is served"
