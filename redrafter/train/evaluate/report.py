"""Format the report of an evaluation as a JSON document, as tables and as a figure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.measure.report import conditions, describe_pair, drawing, format_table
from redrafter.measure.suite_table import AVERAGED, LEGEND, SuiteTable, describe_acceptance, mean_of
from redrafter.train.evaluate.explain import Bucket, Explanation, FormResult, StepCounts, TemperatureExplanation
from redrafter.train.evaluate.options import EvaluateOptions
from redrafter.train.evaluate.replay import ReplayStats, name_tree
from redrafter.train.evaluate.texts import PromptChoice, Texts, repeated_share
from redrafter.tree.sizes import TreeShape

NAMED_SHARE = 0.1  # minimum fraction of all misses for a class to be mentioned
DEEPER_SHARE = 0.25  # if more of the steps accept all drafts, deeper drafts are suggested
BETTER = 1.1  # smaller ratios count as equal
BETTER_GUESSES = 0.05  # smaller differences of the fraction of correct guesses count as equal
MIN_DRAFTS = 100  # minimum size of a bucket whose acceptance is compared
TRAIN = "redrafter regenerate --data {data} --output {output} ..., redrafter train --data {output} ..."
NOT_THE_CAUSE = "it is not the cause"
MIN_PROMPTS = 30  # fewest from which a cause is concluded

REPEATED_TOKENS = 4  # length n of the n-grams whose repeats are counted
MISS_NAMES = {
    "outside_head": "head's vocabulary",
    "near_miss": "near miss",
    "wrong_guess": "wrong guess",
    "node_budget": "node budget",
}


@dataclass(frozen=True)
class TextsResult:
    """Texts of one temperature and one prompt length, and a drafter's statistics on them."""

    texts: Texts  # texts that the base wrote
    shapes: list[TreeShape]  # shapes of the tree
    stats: list[list[ReplayStats]]  # statistics for each shape, for each text
    categories: dict[str, int]  # number of texts of each category, in the order of the texts
    prompt_length: int | None = None  # tokens that the prompts were cut to; None for whole prompts
    skipped: dict[str, int] | None = None  # turns of a suite's category whose prompts were too long; None: no suite


def make_report(
    pair: Pair,
    options: EvaluateOptions,
    prompts: PromptChoice,
    results: Sequence[TextsResult],
    suite: str | None = None,
) -> dict[str, Any]:
    """Create the JSON document.

    `prompts` are in the order of the texts; `results` has one entry per temperature and prompt length. `suite`
    describes a suite, for which `prompts` only has the number of questions; None for other prompts.
    """
    return {
        **conditions(pair.engine.target),
        "model": short_name(pair.name),
        "drafter": short_name(str(pair.drafting_model)),
        "adapter": options.adapter and short_name(options.adapter),
        "seed": options.seed,
        "seeds": "prompt i of all prompts is continued with seed + i",
        "sampling": "temperature alone: no top-k, no top-p, no penalty",
        "new_tokens": options.new_tokens,
        "batch_size": options.batch_size,
        "suite": suite,
        "prompts": {
            "files": [short_name(file) for file in options.prompts],
            "categories": prompts.categories,
            "share_of_a_text": options.prompt_share,
            "most_tokens_of_a_text": options.prompt_tokens,
            "lengths": [length for length in prompts.by_length if length is not None],
            "lengths_left_out": list(prompts.left_out),
            "longest": prompts.longest,
        },
        "temperatures": [_describe_result(result) for result in results],
    }


def _describe_result(result: TextsResult) -> dict[str, Any]:
    spans, first = dict[str, slice](), 0
    for category, count in result.categories.items():
        # Texts are stored in the order of their categories.
        spans[category] = slice(first, first + count)
        first += count
    trees = []
    for shape, stats in zip(result.shapes, result.stats, strict=True):
        by_category = {name: _describe_stats(shape, stats[span]) for name, span in spans.items()}
        trees.append(
            {
                "tree": name_tree(shape),
                "beams": shape.beams,
                "depth": shape.depth,
                "nodes": shape.node_budget,
                "categories": by_category,
                "mean_of_categories": mean_of(
                    list(by_category.values()), ("drafts_per_step", "tokens_per_step", *AVERAGED)
                ),
                "all_steps": _describe_stats(shape, stats),
            }
        )
    return {
        "temperature": result.texts.temperature,
        "prompt_length": result.prompt_length,
        "skipped": result.skipped,
        "texts": {name: _describe_texts(result.texts, span) for name, span in spans.items()},
        "all_texts": _describe_texts(result.texts, slice(None)),
        "trees": trees,
    }


def _describe_texts(texts: Texts, span: slice) -> dict[str, object]:
    continuations, ended = texts.continuations[span], texts.ended[span]
    return {
        "texts": len(continuations),
        "tokens": sum(map(len, continuations)),
        f"repeated_{REPEATED_TOKENS}_grams": repeated_share(continuations, REPEATED_TOKENS),
        "ended": sum(ended) / len(ended) if ended else None,
    }


def _describe_stats(shape: TreeShape, stats: list[ReplayStats]) -> dict[str, Any]:
    total = ReplayStats.sum(shape, stats)
    return {
        "steps": total.steps,
        "tokens": total.emitted,
        "drafts_per_step": total.drafted / total.steps if total.steps else None,
        "tokens_per_step": total.tokens_per_step if total.steps else None,
        "accepted_by_depth": total.accepted_by_depth,
        "tried_by_depth": total.tried,
        **describe_acceptance(total, stats),
    }


def acceptance_rows(document: Mapping[str, Any]) -> tuple[str, list[tuple[str, float, list[float]]]]:
    """Return the name of the first tree of a report, and a row for each kind of texts for `acceptance_section`."""
    rows = []
    for result in document["temperatures"]:
        measured = result["trees"][0]
        kinds = {"": measured["all_steps"]} if len(measured["categories"]) == 1 else measured["categories"]
        for category, stats in kinds.items():
            length = result["prompt_length"]
            name = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}"
            name += "" if length is None else f", after {length} tokens"
            shares = [count / max(stats["steps"], 1) for count in stats["accepted_by_depth"]]
            rows.append((f"{name}, {category}" if category else name, stats["tokens_per_step"] or 0.0, shares))
    return document["temperatures"][0]["trees"][0]["tree"], rows


def suite_tables(document: dict[str, Any]) -> list[SuiteTable]:
    """Return the tables of a suite by temperature and tree, from the document of `make_report`."""
    tables = []
    for result in document["temperatures"]:
        for tree in result["trees"]:
            rows = {
                name: row | {"skipped": result["skipped"][name], "tokens": result["texts"][name]["tokens"]}
                for name, row in tree["categories"].items()
            }
            if len(rows) > 1:
                rows["mean of categories"] = tree["mean_of_categories"]
            counts = {"skipped": sum(result["skipped"].values()), "tokens": result["all_texts"]["tokens"]}
            rows["all turns"] = tree["all_steps"] | counts
            conditions = {"temperature": result["temperature"], "tree": tree["tree"]}
            tables.append(SuiteTable(f"temperature {result['temperature']:g}, tree {tree['tree']}", conditions, rows))
    return tables


def format_report(document: dict[str, Any]) -> Iterator[str]:
    """Format the JSON document of `make_report` as lines of text and tables."""
    prompts, measured = document["prompts"], document["temperatures"]
    counts, files = prompts["categories"], ", ".join(prompts["files"]) or "the package"
    yield from describe_pair(document)
    if document["suite"] is not None:
        yield from (*suite_conditions(document), LEGEND)
        for table in suite_tables(document):
            yield from table.lines()
        return
    yield (
        f"{sum(counts.values())} prompts in {len(counts)} categories from {files}; at most {document['new_tokens']} "
        f"new tokens; seed {document['seed']}; {document['sampling']}"
    )
    if prompts["lengths"]:
        yield "prompts of each length end with the same tokens; only their left context differs"
    if prompts["lengths_left_out"]:
        lengths = ", ".join(map(str, prompts["lengths_left_out"]))
        yield f"not measured: prompts of {lengths} tokens, for the longest prompt has {prompts['longest']}"
    yield "depth d: of the steps that accepted d - 1 drafts and whose text continued, the share that accepted one more"
    at_once = len(prompts["lengths"]) or 1
    for results in (measured[first : first + at_once] for first in range(0, len(measured), at_once)):
        yield from ("", f"temperature {results[0]['temperature']:g}")
        if prompts["lengths"]:  # one row per prompt length
            names = [f"prompts of {result['prompt_length']} tokens" for result in results]
            yield from _format_texts(dict(zip(names, (result["all_texts"] for result in results), strict=True)))
            for trees in zip(*(result["trees"] for result in results), strict=True):
                yield from _format_tree(trees[0], dict(zip(names, (tree["all_steps"] for tree in trees), strict=True)))
            continue
        [result] = results  # one row per category and one for all
        yield from _format_texts({**result["texts"], "all texts": result["all_texts"]})
        for tree in result["trees"]:
            several = len(tree["categories"]) > 1
            rows = {**tree["categories"], "mean of categories": tree["mean_of_categories"]} if several else {}
            yield from _format_tree(tree, {**rows, "all steps": tree["all_steps"]})


def suite_conditions(document: dict[str, Any]) -> Iterator[str]:
    """Yield lines about the suite, the settings and the skipped turns."""
    yield document["suite"]
    yield f"at most {document['new_tokens']} new tokens; seed {document['seed']}; {document['sampling']}"
    for result in document["temperatures"]:
        if skipped := sum(result["skipped"].values()):
            yield (
                f"temperature {result['temperature']:g}: {skipped} turns skipped, since their prompts and the new "
                "tokens do not fit into the model's context"
            )


def _format_texts(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    repeated, keys = f"repeated {REPEATED_TOKENS}-grams", f"repeated_{REPEATED_TOKENS}_grams"
    cells = ((name, *map(row.get, ("texts", "tokens", keys, "ended"))) for name, row in rows.items())
    return format_table(["written by the model", "texts", "tokens", repeated, "ended by itself"], cells)


def _format_tree(tree: dict[str, Any], rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    cells = ((name, row["tokens_per_step"], row["drafts_per_step"], *row["acceptance"]) for name, row in rows.items())
    yield ""
    yield from format_table([tree["tree"], "tokens/step", "drafts/step", *_depths(tree["depth"])], cells)


def _depths(depth: int) -> list[str]:
    return ["depth 1", *map(str, range(2, depth + 1))]


def format_explanation(document: dict[str, Any]) -> Iterator[str]:
    """Format the result of `explain`, with the lines of `advise` as its `advice`, as lines of text and tables."""
    names = MISS_NAMES.values()
    for result in document["temperatures"]:
        counts = result["all_steps"]
        yield from ("", f"why drafts were missed: {document['tree']}, temperature {result['temperature']:g}")
        columns = zip(counts["tried"], counts["accepted"], counts["misses"], strict=True)
        by_depth = (
            (depth, tried, hit, *map(missed.get, MISS_NAMES)) for depth, (tried, hit, missed) in enumerate(columns, 1)
        )
        yield from format_table(["depth", "tried", "accepted", *names], by_depth)
        yield ""
        endings = (
            (name, ends["steps"], *_misses(ends).values(), ends["all_accepted"], ends["text_ended"])
            for name, ends in {**result["categories"], "all": counts}.items()
        )
        yield from format_table(["how steps ended", "steps", *names, "all accepted", "text ended"], endings)
        for title, kind in (("the base gave its token", "by_probability"), ("tokens before the draft", "by_context")):
            buckets = [bucket for bucket in result[kind] if bucket["drafts"]]
            missed = sum(bucket["drafts"] - bucket["accepted"] for bucket in buckets)
            shares = (
                (name, drafts, accepted / drafts, (drafts - accepted) / missed if missed else None)
                for name, drafts, accepted in (bucket.values() for bucket in buckets)
            )
            yield ""
            yield from format_table([title, "drafts", "acceptance", "share of misses"], shares)
    guesses = {
        f"the base's text, temperature {one['temperature']:g}": one["best_guess"] for one in document["temperatures"]
    }
    if document["best_guess_on_data"] is not None:
        written = f", temperature {document['data_temperature']:g}" if document["data_has_temperature"] else ""
        guesses[", ".join(document["data"]) + written] = document["best_guess_on_data"]
    depths = _depths(document["depth"])
    yield ""
    yield from format_table(["best guess is right", *depths], ((name, *shares) for name, shares in guesses.items()))
    if document["form_prompts"]:
        forms = (
            (name, document[name]["tokens_per_step"], *document[name]["acceptance"]) for name in ("plain", "template")
        )
        yield ""
        yield from format_table([f"{document['form_prompts']} prompts, greedy", "tokens/step", *depths], forms)
    yield from ("", "suggestions", *(f"  {line}" for line in document["advice"]))


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw acceptance by depth: a line for each shape, a column for each temperature, a row for each prompt length.

    `document` is the report of `make_report`, and `path` the `.png` file to write.
    """
    measured, rows = document["temperatures"], len(document["prompts"]["lengths"]) or 1
    columns = len(measured) // rows
    below = f"{document['model']}, drafter {document['drafter']}, {document['dtype']}, {document['hardware']}"
    grid = {"nrows": rows, "ncols": columns, "sharey": True, "squeeze": False}
    with drawing(path, below, (1 + 6 * columns, 5 * rows), **grid) as panels:
        for axes, result in zip(panels.T.flat, measured, strict=True):
            for tree in result["trees"]:
                steps = tree["all_steps"]
                points = [(depth, rate) for depth, rate in enumerate(steps["acceptance"], 1) if rate is not None]
                per_step = steps["tokens_per_step"]
                label = tree["tree"] if per_step is None else f"{tree['tree']}: {per_step:.2f} tokens per step"
                # Trees without a node budget verify more drafts, so they are drawn apart.
                style = "o--" if tree["nodes"] is None else "o-"
                axes.plot(
                    [depth for depth, _ in points], [rate for _, rate in points], style, markersize=4, label=label
                )
            title = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}"
            length = result["prompt_length"]
            axes.set_title(title if length is None else f"{title}, prompts of {length} tokens", fontsize=10)
            axes.set_xticks(range(1, max(tree["depth"] for tree in result["trees"]) + 1))
            axes.set_xlabel("depth of the draft")
            axes.set_ylim(0, 1)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, frameon=False)
        for axes in panels[:, 0]:
            axes.set_ylabel("share accepted, of those whose parent was")


def _misses(counts: StepCounts) -> dict[str, int]:
    return {miss: sum(depth[miss] for depth in counts["misses"]) for miss in MISS_NAMES}


def advise(explanation: Explanation) -> Iterator[str]:
    """Yield lines with findings and suggested commands, for the highest temperature."""
    measured = explanation["temperatures"]
    # The highest temperature has the most misses to explain.
    last = max(measured, key=lambda one: one["temperature"])
    if last["all_steps"]["steps"]:
        yield from _advise_on_misses(explanation, last["all_steps"], last["temperature"])
    prompts = explanation["prompts"]
    yield _temperature(measured, prompts)
    # Are the misses where the base itself was unsure?
    unsure, drafts = last["by_probability"][0], sum(one["drafts"] for one in last["by_probability"])
    missed = drafts - sum(one["accepted"] for one in last["by_probability"])
    if missed:
        share = (unsure["drafts"] - unsure["accepted"]) / missed
        found = f"the base gave its own token less than 0.5 at {unsure['drafts'] / drafts:.0%} of the drafts"
        known = share * drafts > BETTER * unsure["drafts"]
        mend = "no drafter guesses such tokens well, a lower --temperature draws fewer" if known else NOT_THE_CAUSE
        yield f"certainty: {found}, where {share:.0%} of the misses are; {_conclusion(mend, prompts)}"
    else:
        yield "certainty: no draft was missed"
    yield _data(explanation)
    yield _template(explanation["plain"], explanation["template"], explanation["form_prompts"])
    yield _context(last["by_context"], prompts)


def _conclusion(text: str, prompts: int) -> str:
    """Return a conclusion, or that it takes more prompts."""
    return text if prompts >= MIN_PROMPTS else f"{prompts} prompts are too few to conclude, give {MIN_PROMPTS} or more"


def _interval(mean: float, margin: float | None) -> str:
    return f"{mean:.2f}" if margin is None else f"{mean:.2f} ± {margin:.2f}"


def _advise_on_misses(explanation: Explanation, counts: StepCounts, temperature: float) -> Iterator[str]:
    """Yield a line for each frequent class of misses, and one if drafts are too short."""
    beams, depth, lattice = explanation["beams"], explanation["depth"], explanation["lattice"]
    head, vocabulary = explanation["head"], explanation["vocabulary"]
    causes = {
        "outside_head": f"tokens that the drafter's head lacks: it has {head} of {vocabulary}: redrafter train "
        f"--draft-vocab-size {min(2 * head, vocabulary)} ...",
        "near_miss": f"just below the beams: redrafter evaluate --shapes {2 * beams}x{depth}, and if that pays "
        f"--num-beams {2 * beams}",
        "wrong_guess": "far from the beams, which only training mends: "
        + TRAIN.format(data="prompts.jsonl", output="own.jsonl"),
        "node_budget": f"drafted and not verified, for {explanation['nodes']} of {lattice} nodes are: "
        f"--node-budget {lattice}",
    }
    misses = _misses(counts)
    total = sum(misses.values())
    # The largest cause first.
    for name, count in sorted(misses.items(), key=lambda item: -item[1]):
        if count >= NAMED_SHARE * total and count:
            yield f"{count / total:.0%} of the misses at temperature {temperature:g} are {causes[name]}"
    if counts["all_accepted"] >= DEEPER_SHARE * counts["steps"]:
        yield (
            f"{counts['all_accepted'] / counts['steps']:.0%} of the steps accepted all {depth} drafts: redrafter "
            f"evaluate --shapes {beams}x{depth + 3}, and if that pays --draft-len-per-beam {depth + 3}"
        )


def _temperature(measured: Sequence[TemperatureExplanation], prompts: int) -> str:
    known = [
        (one["temperature"], speed, one["margin"]) for one in measured if (speed := one["tokens_per_step"]) is not None
    ]
    greedy = [(speed, margin) for temperature, speed, margin in known if temperature == 0]
    others = [one for one in known if one[0] > 0]
    if not greedy or not others:
        return "temperature: only greedy texts were measured; to compare: redrafter evaluate --temperatures 0,1"
    hottest, per_step, margin = max(others)
    found = f"greedy {_interval(*greedy[0])} tokens per step, at {hottest:g} {_interval(per_step, margin)}"
    mend = f"sampled tokens are harder to guess: --temperature {hottest / 2:g}"
    verdict = NOT_THE_CAUSE if greedy[0][0] < BETTER * per_step else mend
    return f"temperature: {found}; {_conclusion(verdict, prompts)}"


def _data(explanation: Explanation) -> str:
    """Compare the drafter's guesses on its training data with those on the base's text of the same temperature."""
    if explanation["best_guess_on_data"] is None:
        return "training data: not compared; to do so: redrafter evaluate --explain --data FILE"
    trained, temperature, data = (
        explanation["best_guess_on_data"][0],
        explanation["data_temperature"],
        explanation["data"],
    )
    # Only texts of the same temperature compare: sampled tokens are harder to guess than greedy ones.
    own = next(one["best_guess"][0] for one in explanation["temperatures"] if one["temperature"] == temperature)
    if trained is None or own is None:
        return "training data: no text is long enough to compare; give another file: --data FILE"
    both = ", both" if explanation["data_has_temperature"] else ""
    found = f"first guesses are right for {trained:.0%} of the data and {own:.0%} of the base's own text"
    found += f"{both} at temperature {temperature:g}"
    if explanation["prompts"] < MIN_PROMPTS:
        return f"training data: {found}; {_conclusion('', explanation['prompts'])}"
    if trained < own + BETTER_GUESSES:
        return f"training data: {found}; {NOT_THE_CAUSE}"
    # An output must not be one of the files that the commands read.
    names = ["own.jsonl", *(f"own-{number}.jsonl" for number in range(2, len(data) + 2))]
    output = next(name for name in names if name not in data)
    if not explanation["data_has_temperature"]:
        return f"training data: {found}: {TRAIN.format(data=' '.join(data), output=output)}"
    more = f"redrafter regenerate --data prompts.jsonl --output {output} ..., redrafter train --data"
    return f"training data: {found}: it memorised these rows, so add others: {more} {' '.join(data)} {output} ..."


def _template(plain: FormResult | None, template: FormResult | None, prompts: int) -> str:
    if plain is None or template is None:
        return "chat template: not compared: the base has none, or no prompt fits with it"
    without, within = plain["tokens_per_step"], template["tokens_per_step"]
    if without is None or within is None:
        return "chat template: not compared: the base ended all texts at once; to measure others: --prompts FILE"
    within_margin, without_margin = template["margin"] or 0.0, plain["margin"] or 0.0
    found = (
        f"{_interval(without, plain['margin'])} tokens per step after plain prompts, "
        f"{_interval(within, template['margin'])} after the same as a user's turn"
    )
    if prompts < MIN_PROMPTS:
        return f"chat template: {found}; {_conclusion('', prompts)}"
    if abs(within - without) < within_margin + without_margin:
        return f"chat template: {found}; {NOT_THE_CAUSE}"
    if within > BETTER * without:
        return f"chat template: {found}: send chats, such as rows of messages or redrafter generate --chat"
    if without > BETTER * within:
        return f"chat template: {found}; the drafter does not know chats: redrafter train --data chats.jsonl ..."
    return f"chat template: {found}; {NOT_THE_CAUSE}"


def _context(buckets: Sequence[Bucket], prompts: int) -> str:
    """Compare the acceptance after the shortest contexts with that after the longest ones."""
    rates = [(one["name"], one["accepted"] / one["drafts"]) for one in buckets if one["drafts"] >= MIN_DRAFTS]
    if len(rates) < 2:
        return (
            "context: all drafts follow about the same number of tokens; to compare: redrafter evaluate "
            "--prompt-lengths 256,1024"
        )
    (short, first), (long, last) = rates[0], rates[-1]
    found = f"acceptance is {first:.3f} after {short} tokens, {last:.3f} after {long}"
    if first < BETTER * last or prompts < MIN_PROMPTS:
        return f"context: {found}; {_conclusion(NOT_THE_CAUSE, prompts)}"
    return f"context: {found}: redrafter train --length N ..., with N as long as the served texts"
