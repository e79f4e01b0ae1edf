"""Options of the commands. A default stands here once: flags and their help are made from the fields."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter.app.flags import biases, flag, integers, names, option, shown
from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError

__all__ = [
    "ONLY_TEXTS",
    "PROMPTS",
    "BenchOptions",
    "CompareOptions",
    "DraftOptions",
    "GenerationOptions",
    "LoadOptions",
    "PromptOptions",
    "TuneOptions",
]

MOST = 1_000_000  # of anything that is counted
PROMPTS = (
    "rows to write on from, in .jsonl, .json or a dataset: their text, prompt, input and instruction, or messages up "
    "to the first answer; any other file: one prompt a line (default: sixteen that ship)"
)


@dataclass(frozen=True)
class LoadOptions:
    """What to load, and how."""

    model: str | None = option(
        None, "hub id or directory of the target, or of a merged checkpoint (default: the boxed pair)", metavar="M"
    )
    drafter: str | None = option(
        None, "hub id or directory of the drafter (default: the one in the merged checkpoint)", metavar="D"
    )
    num_beams: int | None = option(
        None, "beams of the drafter's search, which no text depends on (default: the checkpoint's)"
    )
    draft_len_per_beam: int | None = option(None, "tokens drafted per beam (default: the checkpoint's)")
    node_budget: int | None = option(
        None,
        "drafts verified per step, counting the root (default: the checkpoint's, or what suits device and batch size)",
    )
    tuning: str = option(
        "auto",
        "shapes by batch size: the file that `redrafter tune` wrote for this pair and device if there is one (auto), "
        "another FILE, or none; the three flags before this one win over it",
        metavar="FILE|auto|none",
    )
    dtype: str = option("auto", "number format", choices=("auto", "float32", "bfloat16", "float16"))
    device: str | None = option(None, "cpu, cuda, cuda:1, ... (default: the GPU, where there is one)")
    trust_remote_code: bool = option(False, "run the modelling code that comes with the model")
    kv_cache_free_gpu_memory_fraction: float = option(
        EngineOptions.kv_cache_free_gpu_memory_fraction,
        "of the GPU memory left by the model, the share that keys and values may take",
    )
    max_input_len: int | None = option(
        EngineOptions.max_input_len, "longest prompt, in tokens (default: the model's context)"
    )
    max_seq_len: int | None = option(
        EngineOptions.max_seq_len, "longest text, prompt included (default: the model's context)"
    )
    compile: bool = option(EngineOptions.compile, "do not compile the model for a GPU: slower, but sooner ready")


@dataclass(frozen=True)
class DraftOptions:
    """What drafts in place of a recurrent drafter: a second LM, or the text itself."""

    draft_model: str | None = option(
        None, "hub id or directory of a smaller LM with the same vocabulary, to draft with", metavar="D"
    )
    prompt_lookup: bool = option(False, "draft what followed the same words earlier in the text")
    draft_len: int | None = option(None, "tokens drafted per step by either (default: 4)")
    ngram: int | None = option(None, "words to look up, at most (default: 2)")
    acceptance: str | None = option(
        None,
        "keep a draft that is what the model draws itself (match), or by its odds in both models (rejection: not the "
        "same tokens, the same distribution) (default: match)",
        choices=("match", "rejection"),
    )
    adaptive: bool = option(False, "draft fewer tokens where few were kept of late or the draft model is in doubt")
    draft_device: str | None = option(None, "device of the draft model (default: the model's)")
    draft_target_model_config: str | None = option(
        None,
        'draft length, device of the draft model, device of the model, and whether to accept by odds, as "[4,[0],[1],'
        'False]"; in place of --draft-len, --draft-device, --device and --acceptance',
        metavar="LIST",
    )


@dataclass(frozen=True)
class PromptOptions:
    """How much of a row of text is a prompt; the same for every command that takes `--prompts`."""

    prompt_share: float = option(1.0, "of the tokens of a row of text, the share that is its prompt")
    prompt_tokens: int | None = option(None, "of a row of text, at most so many tokens are its prompt (default: all)")

    def __post_init__(self) -> None:
        if not 0 < self.prompt_share <= 1:
            raise ArgumentError(f"--prompt-share must be above 0 and at most 1, got {self.prompt_share:g}")
        if self.prompt_tokens is not None:
            _check_numbers(self, "prompt_tokens")

    @property
    def cut(self) -> dict[str, Any]:
        """Arguments for `encode` of the prompts."""
        return {"share": self.prompt_share, "most": self.prompt_tokens}


@dataclass(frozen=True)
class CompareOptions(PromptOptions):
    """What `redrafter compare` writes on from, and how it counts."""

    prompts: str | None = option(None, PROMPTS, metavar="FILE")
    num_prompts: int | None = option(None, "of them, the first N (default: all)")
    max_input_len: int | None = option(None, "leave out prompts of more tokens (default: none)")
    batch_size: int = option(1, "prompts decoded at once")
    repeats: int = option(1, "runs of each, in turn, of which the median counts")
    assisted: bool = option(
        False, "Hugging Face's assisted generation with the same draft model too, one prompt at a time"
    )
    disable_output_comparison: bool = option(False, "do not compare the outputs, nor fail where they differ")
    output: str | None = option(
        None, "write the JSON document to a file too, with all texts and where they part", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts", "max_input_len", "batch_size", "repeats"):
            if getattr(self, name) is not None:
                _check_numbers(self, name)
        if self.output == "":
            raise ArgumentError("--output needs a name, got an empty one")


@dataclass(frozen=True)
class GenerationOptions:
    """How to write. Names and meanings are Hugging Face's; None leaves it to the model's generation config."""

    max_new_tokens: int = option(128, "most tokens to write")
    temperature: float | tuple[float, ...] | None = option(
        None,
        "0 is greedy; above, sample, whatever the checkpoint's greedy_search says (default: greedy, unless the "
        "checkpoint says to sample); `generate` takes one for each prompt too: 0.7,0.2",
    )
    top_k: int | None = option(None, "sample from the k likeliest tokens")
    top_p: float | None = option(None, "sample from the likeliest tokens that hold this much probability")
    min_p: float | None = option(None, "sample from tokens at least this likely, relative to the likeliest")
    repetition_penalty: float | None = option(None, "above 1, what was written becomes less likely")
    frequency_penalty: float | None = option(None, "taken from a token's score each time that it was written")
    presence_penalty: float | None = option(None, "taken from a token's score once it was written")
    logit_bias: Mapping[int, float] | None = option(
        None, "added to the scores of token ids, such as 11=-100,42=2.5", type=biases, metavar="ID=X,..."
    )
    bad_words: Sequence[str] = option(
        (),
        "never write this, with or without a space before it (may be repeated); its tokens are forbidden in a row, so "
        "that other tokens may still spell it",
        action="append",
        metavar="TEXT",
    )
    seed: int | None = option(None, "of the sampling; the same seed gives the same text (default: fresh)")
    stop: Sequence[str] = option((), "end after this text (may be repeated)", action="append", metavar="TEXT")
    stop_token_ids: Sequence[int] = option(
        (), "end after these tokens too, beside those that end the model's texts", type=integers, metavar="ID,..."
    )
    speculate: bool = option(True, "plain decoding, without the drafter")

    def __post_init__(self) -> None:
        if isinstance(self.temperature, tuple):
            if not all(0 < each < math.inf for each in self.temperature):
                raise ArgumentError(
                    f"each --temperature must be above 0, got {shown(self.temperature)}; write greedily in another run"
                )
        elif self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ArgumentError(f"--temperature must be 0 (greedy) or more, got {self.temperature}")
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None and not self.sampling:
                raise ArgumentError(f"--{name.replace('_', '-')} is for sampling: give --temperature above 0 too")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ArgumentError(f"--{name.replace('_', '-')} must be from 0 to 1, got {value:g}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise ArgumentError(f"{flag(name)} must be a finite number, got {getattr(self, name)}")
        if not all(map(math.isfinite, (self.logit_bias or {}).values())):
            raise ArgumentError(f"--logit-bias must be of finite numbers, such as 11=-100, got {self.logit_bias}")
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                raise ArgumentError(f"{flag(name)} needs a text, got an empty one")

    @property
    def sampling(self) -> bool:
        """Whether it was asked for."""
        return bool(self.temperature)


# Options that `redrafter compare` has not: transformers' own way beside ours has none of that name.
ONLY_TEXTS = ("frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "stop_token_ids")


@dataclass(frozen=True)
class TuneOptions(PromptOptions):
    """What `redrafter tune` tries, on what, and for how long."""

    prompts: str | None = option(None, PROMPTS, metavar="FILE")
    max_new_tokens: int = option(64, "tokens that each tree writes on from a prompt")
    batch_sizes: Sequence[int] | None = option(
        None, "rows decoded at once (default: 1,2,4,8,16,32,64; on a CPU 1,2,4)", type=integers, metavar="N,..."
    )
    beams: Sequence[int] = option((1, 3, 5, 10), "beams to try", type=integers, metavar="N,...")
    lengths: Sequence[int] = option((3, 5), "draft lengths per beam to try", type=integers, metavar="N,...")
    temperature: float = option(0.0, "0 is greedy; above, sample")
    seed: int = option(0, "of the sampling")
    seconds: float = option(300.0, "measure for this long at most; what was measured by then counts")
    out: str | None = option(None, "where to write (default: where from_pretrained looks)", metavar="FILE")
    plot: str | None = option(None, "draw it too; needs matplotlib", metavar="FILE.png")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beams", "lengths", "batch_sizes"):
            if getattr(self, name) is not None:
                _check_numbers(self, name)
        if not 0 <= self.seconds < math.inf:
            raise ArgumentError(f"--seconds must be 0 or more, got {self.seconds:g}")
        _check_writing(self)


@dataclass(frozen=True)
class BenchOptions(PromptOptions):
    """What `redrafter bench` measures, and against what."""

    prompts: str | None = option(None, PROMPTS, metavar="FILE")
    num_prompts: int = option(8, "rows that each batch size is measured on, at least")
    max_new_tokens: int = option(128, "tokens that each row writes; no token ends a text")
    batch_sizes: Sequence[int] = option((1,), "rows decoded at once", type=integers, metavar="N,...")
    temperature: float = option(0.0, "0 is greedy; above, sample")
    seed: int = option(0, "of the sampling")
    repeats: int = option(3, "runs of each, of which the median counts")
    context: Sequence[int] = option(
        (),
        "time the parts of a step behind so many tokens too; past the model's context only times mean anything "
        "(default: the prompts' own alone)",
        type=integers,
        metavar="N,...",
    )
    against: Sequence[str] = option(
        (),
        "Hugging Face's generate on the same prompts: eager, static (compiled), assisted (default: none)",
        type=names,
        metavar="WHICH,...",
    )
    assistant_model: str | None = option(None, "for assisted (default: prompt lookup)", metavar="M")
    pad_to: str | None = option(
        None, "pad a small Llama to a large one's cost, such as llama-3.1-8b, and measure that", metavar="SHAPE"
    )
    pad_head_rank: int | None = option(
        None, "with --pad-to, rank of the drafter's head, where it has one (default: grown like the hidden size)"
    )
    draft_vocab_sizes: Sequence[int] = option(
        (), "time drafting with random heads of so many ids (default: none)", type=integers, metavar="N,..."
    )
    plots: str | None = option(None, "draw the report into this directory; needs matplotlib", metavar="DIR")
    json: str | None = option(None, "write the JSON document to a file too, as far as it has come", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_sizes", "context", "draft_vocab_sizes", "num_prompts", "repeats"):
            _check_numbers(self, name)
        if self.pad_head_rank is not None:
            _check_numbers(self, "pad_head_rank")
            if self.pad_to is None:
                raise ArgumentError("--pad-head-rank is for --pad-to: give that too")
        object.__setattr__(self, "against", tuple(dict.fromkeys(self.against)))
        if self.assistant_model is not None and "assisted" not in self.against:
            raise ArgumentError("--assistant-model is for --against assisted: add that")
        for name in ("plots", "json"):
            if getattr(self, name) == "":
                raise ArgumentError(f"--{name} needs a name, got an empty one")
        _check_writing(self)


def _check_numbers(options: Any, name: str) -> None:
    """One number or several, each once; all are counts of something that must fit into a machine."""
    value = getattr(options, name)
    numbers = tuple(dict.fromkeys(value)) if isinstance(value, tuple) else (value,)
    if not all(1 <= number <= MOST for number in numbers):
        raise ArgumentError(f"--{name.replace('_', '-')} must be from 1 to {MOST}, got {shown(value)}")
    if isinstance(value, tuple):
        object.__setattr__(options, name, numbers)


def _check_writing(options: Any) -> None:
    """What tuning and benchmarks ask of every text that they write."""
    if options.max_new_tokens < 2:
        raise ArgumentError(f"--max-new-tokens must be 2 or more, got {options.max_new_tokens}")
    if not 0 <= options.temperature < math.inf:
        raise ArgumentError(f"--temperature must be 0 (greedy) or more, got {options.temperature}")
    if not 0 <= options.seed < 1 << 62:
        raise ArgumentError(f"--seed must be from 0 to 2**62 - 1, got {options.seed}")
