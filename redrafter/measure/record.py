"""One measurement as one object: a row of the table that a command prints, and a line of `--json`.

Outputs are compared with undrafted decoding, and rounding may explain where they differ.
"""

import json
import math
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers
from torch import Tensor

from redrafter.engine.call import GenerateOutput
from redrafter.engine.engine import Engine
from redrafter.files.atomic_file import write_atomically
from redrafter.files.dtype_names import dtype_name
from redrafter.model.target import Target
from redrafter.sampling.noise import gumbel
from redrafter.scheduler.sequence import Stats
from redrafter.version import __version__

UNDRAFTED = "undrafted"  # the mode without drafts
PROMPT_LOOKUP = "prompt lookup"  # the mode whose drafts are copies from the text
# Rounding may move a logit by this many steps of the format at the largest logit. Of the 20 likeliest tokens at 9,500
# positions of SmolLM2 in bfloat16, computed in two shapes, one in a thousand moved by more than 4; the most is 7.5.
HALF_PRECISION_STEPS = 8
FLOAT32_TOLERANCE = 1e-4  # the same in float32 and float64, where rounding differs by a few 1e-5
# The largest change of a logit of 49,152, in standard deviations: of a model in float32 that rounds inside its layers.
ROUNDING_DEVIATIONS = 5
ROUNDS_INSIDE = "rounds inside its layers: outputs are as exact as in bfloat16, and near-ties may differ"
MAX_TEXTS, MAX_LINE_CHARS = 3, 60  # printed differences per method, and characters of each


@dataclass(frozen=True)
class Difference:
    """The first position where the outputs of undrafted decoding and of another method differ on one prompt."""

    prompt: int  # index of the prompt
    token: int  # index of the first new token that differs
    common: str  # the new text before that token
    undrafted: int | None  # token id of undrafted decoding there; None if its output has ended
    other: int | None  # the same of the other method
    undrafted_text: str  # from there on
    other_text: str
    # How far the lower score of both tokens is below the best one, by undrafted decoding's own logits with processors
    # and noise; None if a processor forbids one of them.
    margin: float | None = None
    tolerance: float | None = None  # how far rounding may move a logit
    near_tie: bool = False  # whether each of both tokens is drawn once its logit is raised by `tolerance`


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or None when all are equal; a missing token differs."""
    differing = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, None if len(a) == len(b) else min(len(a), len(b)))


def tolerance(logits: Tensor, dtype: torch.dtype, rounding: float = 0.0) -> float:
    """Return how far rounding may move a logit of `logits`, `[V]`, in a model of this dtype.

    `rounding` is the share of their spread by which the logits of a model that rounds inside its layers change.
    """
    info, finite = torch.finfo(dtype), logits[logits.isfinite()]
    if info.bits >= 32:
        return max(FLOAT32_TOLERANCE, ROUNDING_DEVIATIONS * rounding * float(finite.std()))
    largest = float(finite.abs().max())
    return HALF_PRECISION_STEPS * info.eps * 2.0 ** math.floor(math.log2(max(largest, info.tiny)))


def find_differences(
    engine: Engine,
    arguments: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    undrafted: Sequence[Sequence[int]],
    repeats: Sequence[Sequence[Sequence[int]]],
    decode: Callable[[list[int]], Any] = lambda tokens: "",
) -> list[Difference]:
    """Return one difference for each prompt whose output differs from undrafted decoding's.

    If repeats of a prompt differ in several places, a difference that rounding cannot explain takes precedence over a
    near-tie (`Difference.near_tie`), and then the smallest token index.

    Args:
        engine: The engine of undrafted decoding, whose logits identify near-ties.
        arguments: Arguments of `generate` for undrafted decoding; where `seed` is s, prompt i was decoded with s + i,
            and where `temperature` is a list, with its temperature i.
        prompts: Token ids of each prompt.
        undrafted: New token ids of undrafted decoding for each prompt.
        repeats: New token ids of the other method for each prompt, repeat by repeat.
        decode: Makes text of token ids.
    """
    worst, seed = [], arguments.get("seed")
    for row, (prompt, expected) in enumerate(zip(prompts, undrafted, strict=True)):
        found = []
        # A set: equal repeats need to be judged once only.
        for output in {tuple(texts[row]) for texts in repeats}:
            at = first_difference(expected, output)
            if at is None:
                continue
            common = decode(list(expected[:at]))
            a, b = (text[at] if at < len(text) else None for text in (expected, output))
            # Decode the whole text: a token decoded by itself may lose its leading space.
            mine, other = (decode(list(text))[len(common) :] for text in (expected, output))
            verdict: dict[str, Any] = {}
            if a is not None and b is not None:
                own = {**arguments, "seed": None if seed is None else seed + row}
                if isinstance(temperatures := arguments.get("temperature"), list):
                    own["temperature"] = temperatures[row]
                verdict = _judge(engine, own, [*prompt, *expected[:at]], [a, b])
            found.append(Difference(row, at, common, a, b, mine, other, **verdict))
        # One difference per prompt, first one that rounding cannot explain.
        worst += sorted(found, key=lambda difference: (difference.near_tie, difference.token))[:1]
    return worst


def _judge(engine: Engine, arguments: dict[str, Any], text: list[int], tokens: list[int]) -> dict[str, Any]:
    """Return the fields of a `Difference` from `margin` on, for two candidate tokens after a text."""

    def draw(bias: dict[int, float]) -> GenerateOutput:
        left_out = ("stop_strings", "tokenizer", "num_return_sequences")
        one = {name: value for name, value in arguments.items() if name not in left_out}
        one |= {"max_new_tokens": 1, "speculate": False, "output_logits": True, "output_scores": True}
        ids = torch.tensor([text])  # [1, P]
        # A cached prefix was computed with other shapes and may round differently.
        engine.forget_prefixes()
        out = engine.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **one, logit_bias=bias)
        assert isinstance(out, GenerateOutput)
        return out

    out = draw({})
    assert out.logits is not None
    assert out.scores is not None
    logits, scores = out.logits[0][0].float(), out.scores[0][0].float()  # [V]
    if arguments["do_sample"]:
        ids = torch.arange(len(scores), device=scores.device)  # [V]
        at = ([arguments["seed"]], [[len(text)]])
        seed, position = (torch.tensor(value, device=scores.device) for value in at)
        scores = scores + gumbel(seed, position, ids)[0, 0]
    margin = float(scores.max() - scores[tokens].min())
    most = tolerance(logits, engine.target.dtype, engine.target.rounding)
    # Raise each token's logit by the tolerance: if both are then drawn, rounding explains the difference.
    drawn = [int(draw({token: most}).sequences[0, -1]) for token in tokens]
    return {"margin": margin if math.isfinite(margin) else None, "tolerance": most, "near_tie": drawn == tokens}


def describe_differences(differences: Sequence[Difference], method: str) -> Iterator[str]:
    """Yield lines that show a method's first differences, near-ties last; » marks the first differing token."""
    width = max(len("undrafted"), len(method))
    for difference in sorted(differences, key=lambda difference: difference.near_tie)[:MAX_TEXTS]:
        kind = "near-tie" if difference.near_tie else "OTHER TOKENS"
        where = f"  {kind} in prompt {difference.prompt + 1} at new token {difference.token + 1}"
        margin, most = difference.margin, difference.tolerance
        if most is None:
            yield f"{where}: one text ends there"
        elif margin is None:
            yield f"{where}: a sampling parameter rules one of the two out"
        else:
            yield f"{where}: the lower is {margin:.3g} below the best; rounding explains {most:.3g}"
        mine = ("undrafted", difference.undrafted_text, difference.undrafted)
        for name, text, token in (mine, (method, difference.other_text, difference.other)):
            # JSON quoting escapes line breaks and control characters.
            parts = (difference.common[-MAX_LINE_CHARS:], text[:MAX_LINE_CHARS])
            shown = "»".join(json.dumps(part, ensure_ascii=False)[1:-1] for part in parts)
            yield f"    {name:<{width}}  {shown}  (id {'none' if token is None else token})"
    if len(differences) > MAX_TEXTS:
        yield f"  and {len(differences) - MAX_TEXTS} more, which --json FILE holds"


@dataclass
class Record:
    """Holds the measurements of one mode of decoding on some prompts. A value that was not measured is None."""

    mode: str  # `UNDRAFTED`, a method of drafting, or the tree whose drafts were counted
    category: str | None = None  # of the prompts; None for prompts of all categories
    temperature: float = 0.0  # 0 for greedy decoding
    batch_size: int | None = None
    prompt_length: int | None = None  # tokens that the prompts were cut to; None for whole prompts
    texts: int = 0
    skipped: int | None = None  # turns of a suite whose prompts are too long
    tokens: int = 0  # new ones, of one repeat
    # Speed: medians over repeats, prefill included.
    seconds: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None  # in tokens per second, over undrafted decoding
    first_token_ms: float | None = None  # from the call to the first token of a batch
    ms_per_token: float | None = None  # of a row after its first token
    first_call_s: float | None = None  # of the first call at this batch size, which captures and may compile
    # Drafts, of one repeat. A step is one forward of the target over a tree.
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    emitted: int | None = None  # tokens of steps: not the first token of each text
    tokens_per_step: float | None = None
    drafts_per_step: float | None = None
    accepted_length: float | None = None  # 1 + accepted drafts / steps that had drafts
    accepted_length_of_texts: float | None = None  # the mean of that over texts
    accepted_by_depth: list[int] | None = None  # entry d counts the steps that accepted at least d + 1 drafts
    # Entry d: of the steps that accepted d drafts, the share with one more.
    acceptance: list[float | None] | None = None
    # The tokens of undrafted decoding, where the mode promises them.
    same: int | None = None  # texts that are equal
    near_ties: int | None = None  # of the others, those that rounding explains
    differences: list[Difference] | None = None  # the worst one of each text that differs
    # One step at the middle of the texts, in ms; floors are bytes by copy bandwidth.
    nodes: int | None = None
    step_ms: float | None = None
    draft_ms: float | None = None
    draft_floor_ms: float | None = None
    verify_ms: float | None = None
    verify_floor_ms: float | None = None
    rest_ms: float | None = None
    # The texts themselves.
    repeated: float | None = None  # share of the 4-grams that repeat an earlier one of their text
    ended: float | None = None  # share of the texts that ended by themselves
    misses: Mapping[str, Any] | None = None  # why drafts were missed
    error: str | None = None  # why there are no numbers

    def count(self, total: Stats, texts: Sequence[Stats]) -> "Record":
        """Set the counts of drafts from the statistics of texts and from their sum, and return the record."""
        lengths = [text.accepted_length for text in texts if text.accepted_length is not None]
        vars(self).update(describe_stats(total))
        self.tokens_per_step = total.tokens_per_step if total.steps else None
        self.drafts_per_step = total.drafted / total.steps if total.steps else None
        self.accepted_length, self.acceptance = total.accepted_length, total.acceptance
        self.accepted_length_of_texts = statistics.fmean(lengths) if lengths else None
        return self

    @property
    def kept(self) -> float | None:
        """Share of the verified drafts that were accepted."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def agreement(self) -> str | None:
        """Describes how many texts equal those of undrafted decoding, for the table."""
        ties = f", {self.near_ties} near-ties" if self.near_ties else ""
        return None if self.same is None else f"{self.same} of {self.texts}{ties}"


class Conditions(TypedDict):
    """The environment of a measurement."""

    command: str
    hardware: str
    device: str
    dtype: str
    versions: dict[str, str | None]


def conditions(target: Target) -> Conditions:
    """Return the command, hardware, dtype and versions that every measurement records."""
    return {
        "command": shlex.join(["redrafter", *sys.argv[1:]]),
        "hardware": hardware(target.device),
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of all software that affects a measurement; `cuda` is None without CUDA."""
    return {
        "redrafter": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def hardware(device: torch.device) -> str:
    """Describe a device, e.g. `NVIDIA H200, 140 GiB` or `x86_64 CPU, 2 threads`."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@dataclass
class Records:
    """The records of a command so far, which a file receives as lines of JSON after each addition.

    Each line also has the conditions, so that it can be read by itself; a command that is interrupted leaves the
    records of finished measurements.
    """

    conditions: Mapping[str, Any]
    path: str | None = None  # None for no file
    rows: list[Record] = field(default_factory=list)

    def add(self, *records: Record) -> None:
        """Append records, and replace the file."""
        self.rows += records
        if self.path is not None:
            lines = (json.dumps(to_json(record) | {"conditions": self.conditions}) + "\n" for record in self.rows)
            write_atomically(Path(self.path), "".join(lines))


def to_json(record: Record) -> dict[str, Any]:
    """Return the values of a record that are not None, as JSON has them."""
    values = {name: value for name, value in vars(record).items() if value is not None}
    if record.differences is not None:
        values["differences"] = [vars(difference) for difference in record.differences]
    return values


def describe_stats(stats: Stats) -> dict[str, Any]:
    """Return the counts of speculation under their names in `Record` and in JSON documents."""
    names = ("steps", "drafted", "accepted", "emitted", "tokens_per_step", "accepted_by_depth")
    return {name: getattr(stats, name) for name in names}


def drafts_left_out(stats: Stats, mode: str) -> str:
    """Say in how many steps a method drafted nothing, and why; nothing where it drafted in most of them."""
    if mode == UNDRAFTED or 2 * stats.undrafted_steps <= stats.steps:
        return ""
    gain = "" if stats.accepted_length is None else f": {stats.accepted_length:.2f} tokens per drafted step here"
    why = ", as the text repeats too little" if mode == PROMPT_LOOKUP else ", which cost more time than they gain"
    return f"; {stats.undrafted_steps} of {stats.steps} steps left out drafts{why}{gain} (docs/acceptance.md)"
