"""Options of `redrafter compare` and `bench`, in a module without torch so that `--help` is fast."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from redrafter.app.flags import integers, names
from redrafter.app.options import MAX_SEED, PROMPTS_HELP, PromptOptions, check_numbers
from redrafter.errors import ArgumentError
from redrafter.options import option

RIVALS = ("eager", "static", "assisted")  # baselines that `--against` may name
# Generation options without a flag in `redrafter compare`: transformers' assisted generation does not support them.
NOT_IN_COMPARE = ("frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "stop_token_ids", "adapter")


@dataclass(frozen=True)
class MeasureOptions(PromptOptions):
    """Options that select the prompts of a measurement."""

    prompts: str | None = option(None, PROMPTS_HELP, metavar="FILE", names="prompts")


@dataclass(frozen=True)
class CompareOptions(MeasureOptions):
    """Options of `redrafter compare`."""

    num_prompts: int | None = option(None, "use the first N prompts (default: all)")
    max_input_len: int | None = option(None, "leave out prompts of more than N tokens (default: none)")
    batch_size: int = option(1, "prompts decoded at once")
    repeats: int = option(1, "runs of each method, in turn; the median counts")
    assisted: bool = option(
        False, "also measure Hugging Face's assisted generation with the same draft model, one prompt at a time"
    )
    disable_output_comparison: bool = option(False, "do not compare the outputs, and do not fail when they differ")
    output: str | None = option(
        None,
        "also write the JSON document, with all texts and their differences, to a file",
        metavar="FILE",
        names="new file",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "num_prompts", "max_input_len", "batch_size", "repeats")


@dataclass(frozen=True)
class WorkOptions(MeasureOptions):
    """Generation options of `bench`."""

    max_new_tokens: int = option(128, "new tokens of each row; no token ends a text early")
    temperature: float = option(0.0, "0 is greedy, a higher value samples")
    seed: int = option(0, "seed of the sampling")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "max_new_tokens", least=2)
        check_numbers(self, "seed", least=0, most=MAX_SEED)
        if not 0 <= self.temperature < math.inf:
            raise ArgumentError(f"--temperature must be 0 (greedy) or more, got {self.temperature}")


@dataclass(frozen=True)
class BenchOptions(WorkOptions):
    """Options of `redrafter bench`: its measurements and baselines."""

    num_prompts: int = option(
        8, "least number of rows to measure each batch size on; with --suite, questions of each category, if not all"
    )
    batch_sizes: Sequence[int] = option((1,), "rows decoded at once", type=integers, metavar="N,...")
    repeats: int = option(3, "runs of each measurement; the median counts")
    waves: int | None = option(
        None,
        "also decode N times as many prompts as rows in one call, with continuous batching (default: no)",
    )
    context: Sequence[int] = option(
        (),
        "also time the parts of a step after N tokens of context; beyond the model's own context, only the times are "
        "valid (default: only after the prompts)",
        type=integers,
        metavar="N,...",
    )
    against: Sequence[str] = option(
        (),
        "also measure Hugging Face's generate on the same prompts: eager, static (compiled), assisted (default: none)",
        type=names,
        metavar="WHICH,...",
    )
    assistant_model: str | None = option(
        None, "draft model of assisted (default: prompt lookup)", metavar="M", names="model"
    )
    pad_to: str | None = option(
        None, "measure a small Llama padded to the cost of a large one, such as llama-3.1-8b", metavar="SHAPE"
    )
    pad_head_rank: int | None = option(
        None, "with --pad-to: rank of the drafter's head, if it has one (default: grown like the hidden size)"
    )
    draft_vocab_sizes: Sequence[int] = option(
        (), "also time drafting with random heads of N ids (default: none)", type=integers, metavar="N,..."
    )
    plots: str | None = option(
        None, "also draw figures into this directory; needs matplotlib", metavar="DIR", names="pictures"
    )
    json: str | None = option(
        None,
        "also write the JSON document to a file, and update it after each measurement",
        metavar="FILE",
        names="new file",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "batch_sizes", "context", "draft_vocab_sizes", "num_prompts", "repeats", "pad_head_rank")
        if self.waves is not None and self.waves < 2:
            raise ArgumentError(f"--waves must be 2 or more, got {self.waves}: a single wave is always measured")
        if self.pad_head_rank is not None and self.pad_to is None:
            raise ArgumentError("--pad-head-rank is for --pad-to: give that too")
        object.__setattr__(self, "against", tuple(dict.fromkeys(self.against)))
        for name in self.against:
            if name not in RIVALS:
                raise ArgumentError(f"--against takes any of {', '.join(RIVALS)}, got {name!r}")
        if self.assistant_model is not None and "assisted" not in self.against:
            raise ArgumentError("--assistant-model is for --against assisted: add that")
