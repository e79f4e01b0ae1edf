"""Flags of TensorRT-LLM's programs and of its server llgtrt, and what each means to the commands of `redrafter`.

The programs are `run.py`, the scripts and clients of ReDrafter and of draft-target decoding, and `trtllm-build`. A flag
is honoured where an option here has the same meaning, accepted with a note where it is not needed, and refused with a
line that says what to type instead in every other case. `redrafter.app.trtllm_translation` applies the table.
"""

from dataclasses import dataclass
from typing import NoReturn, Protocol

__all__ = ["FLAGS", "LLGTRT_FLAGS", "Alias", "CommandParser", "FlagMeaning", "Noted", "Positional", "Refused"]


class CommandParser(Protocol):
    """What a flag's meaning asks of the parser of a command."""

    def has_option(self, name: str) -> bool:
        """Return whether the command has an option."""

    def has_positional(self, name: str) -> bool:
        """Return whether the command takes words without a flag under this name."""

    def takes_value(self, name: str) -> bool:
        """Return whether an option of the command is followed by a value."""

    def error(self, message: str) -> NoReturn:
        """End the program with an error message."""


@dataclass(frozen=True)
class Alias:
    """A flag that is honoured as an option of ours.

    Attributes:
        option: The option that has the same meaning.
        value: The option's value, for a flag that is a switch.
        repeated: Whether several words may follow the flag; the option is then repeated for each word.
    """

    option: str
    value: str | None = None
    repeated: bool = False

    def fits(self, parser: CommandParser) -> bool:
        """Return whether a command has the option."""
        return parser.has_option(self.option)


@dataclass(frozen=True)
class Positional:
    """A flag that is honoured by taking its words as those that the command takes without a flag.

    Attributes:
        name: Name of the positional argument.
    """

    name: str

    def fits(self, parser: CommandParser) -> bool:
        """Return whether a command has the positional argument."""
        return parser.has_positional(self.name)


@dataclass(frozen=True)
class Noted:
    """A flag that is not needed: it is accepted with a note.

    Attributes:
        reason: Why it is not needed, for the note.
        for_option: The meaning is for commands that have this option.
        word_count: Words that follow the flag.
    """

    reason: str
    for_option: str
    word_count: int = 0

    def fits(self, parser: CommandParser) -> bool:
        """Return whether the meaning is for a command."""
        return parser.has_option(self.for_option)


@dataclass(frozen=True)
class Refused:
    """A flag that ends the program with an error.

    Attributes:
        instead: What to type in its place, for the error message.
        for_option: The meaning is for commands that have this option.
    """

    instead: str
    for_option: str

    def fits(self, parser: CommandParser) -> bool:
        """Return whether the meaning is for a command."""
        return parser.has_option(self.for_option)


FlagMeaning = Alias | Positional | Noted | Refused

# An option that only the commands of one group have, by which a meaning finds the commands that it is for.
GENERATING, PRINTING, LOADING, SERVING = "--max-new-tokens", "--color", "--model", "--host"
CONVERTING, RUNNING = "--base-model-checkpoint-dir", "--kv-cache-free-gpu-memory-fraction"
DRAFT_MODEL_FLAG = "--draft-model"

LLGTRT_FLAGS = ("--engine", "--tokenizer", "--lora-root", "--print-complete-config")

_NO_ENGINE = "a Hugging Face model or a merged checkpoint: no engine is built"
_NO_BEAM_SEARCH = "nothing: beam search cannot be drafted for exactly, and --num-beams is the drafter's"
_NO_FILES = "--json, which prints texts and counts; generate(output_logits=True) in Python returns logits"
_DRAFTING_FLAGS = "--drafter, --draft-model or --prompt-lookup: what drafts"
_TORCHRUN = "torchrun --nproc-per-node N -m redrafter and the command: its processes share the model, without a flag"
_EMBEDDING_LAYOUT = "each rank holds the whole embedding table"

# Names have dashes between their words. Of a flag's meanings, a command takes the first that fits its options.
FLAGS: dict[str, tuple[FlagMeaning, ...]] = {
    # models
    "--model": (Positional("model"),),
    "--model-dir": (Alias("--model"), Alias(CONVERTING), Positional("model")),
    "--hf-model-dir": (Alias("--model"), Alias(CONVERTING), Positional("model")),
    "--engine-dir": (
        Refused(f"--model DIR, {_NO_ENGINE}", LOADING),
        Refused(f"MODEL, {_NO_ENGINE}", SERVING),
        Refused("--base-model-checkpoint-dir DIR: an engine holds no weights that can be read", CONVERTING),
    ),
    "--engine": (Refused(f"MODEL, {_NO_ENGINE}", SERVING), Refused(f"--model DIR, {_NO_ENGINE}", LOADING)),
    "--draft-engine-dir": (Refused("--draft-model DIR, a Hugging Face model", DRAFT_MODEL_FLAG),),
    "--tokenizer-dir": (Refused("leave it out: the tokenizer is the one beside the model", RUNNING),),
    "--tokenizer": (Refused("leave it out: the tokenizer is the one beside the model", RUNNING),),
    "--data-type": (Refused("--dtype float16, bfloat16 or float32", "--dtype"),),
    "--hf-data-type": (Refused("--dtype float16, bfloat16 or float32", "--dtype"),),
    "--lora-dir": (Refused("leave it out: merge the adapter into the model first (peft's merge_and_unload)", RUNNING),),
    "--lora-root": (
        Refused("leave it out: merge the adapter into the model first (peft's merge_and_unload)", SERVING),
    ),
    # prompts
    "--input-text": (Positional("prompts"), Refused("--prompts FILE, one prompt a line", "--prompts")),
    "--input-file": (
        Refused("--file FILE, a text file with one prompt a line", "--file"),
        Refused("--prompts FILE, one prompt a line", "--prompts"),
    ),
    "--dataset": (
        Alias("--prompts"),
        Refused(
            "--file FILE, a text file with one prompt a line; `redrafter compare --dataset FILE` takes JSON", "--file"
        ),
    ),
    "--max-input-length": (
        Refused("--max-input-len N, which refuses longer prompts and cuts none", "--max-input-len"),
    ),
    "--no-prompt-template": (Noted("prompts go in as they are, but for --chat-template", "--chat-template"),),
    # writing
    "--max-output-len": (Alias("--max-new-tokens"),),
    "--output-len": (Alias("--max-new-tokens"),),
    "--random-seed": (Alias("--seed"),),
    "--stop-words": (Alias("--stop", repeated=True),),
    "--end-id": (Refused("--stop-token-ids N, which ends a text beside the model's own", "--stop-token-ids"),),
    "--length-penalty": (Refused(_NO_BEAM_SEARCH, GENERATING),),
    "--early-stopping": (Refused(_NO_BEAM_SEARCH, GENERATING),),
    "--beam-search-diversity-rate": (Refused(_NO_BEAM_SEARCH, GENERATING),),
    "--streaming": (
        Noted("text is printed as it is made", PRINTING),
        Refused('"stream": true in a request', SERVING),
    ),
    "--streaming-interval": (Noted("each step's text is printed as it is made", PRINTING, word_count=1),),
    "--output-generation-logits": (Noted("drafts are accepted by logits without it", GENERATING),),
    "--output-logits-npy": (Refused(_NO_FILES, PRINTING),),
    "--output-log-probs-npy": (Refused(_NO_FILES, PRINTING),),
    "--output-cum-log-probs-npy": (Refused(_NO_FILES, PRINTING),),
    "--output-csv": (Refused(_NO_FILES, PRINTING),),
    "--output-npy": (Refused(_NO_FILES, PRINTING),),
    # drafting
    "--max-draft-len": (
        Refused("--draft-len N of a draft model, or --draft-len-per-beam N of a drafter", DRAFT_MODEL_FLAG),
        Refused("--draft-len-per-beam N", "--draft-len-per-beam"),
        Refused("--redrafter-draft-len-per-beam N", CONVERTING),
    ),
    "--num-draft-tokens": (Alias("--draft-len"),),
    "--use-logits": (Alias("--acceptance", value="rejection"),),
    "--use-draft-logits": (Alias("--acceptance", value="rejection"),),
    "--prompt-lookup-config": (Refused("--prompt-lookup --draft-len N --ngram N", "--prompt-lookup"),),
    "--ngram-config": (Refused("--prompt-lookup --draft-len N --ngram N", "--prompt-lookup"),),
    "--medusa-choices": (Refused(_DRAFTING_FLAGS, DRAFT_MODEL_FLAG),),
    "--eagle-choices": (Refused(_DRAFTING_FLAGS, DRAFT_MODEL_FLAG),),
    "--lookahead-config": (Refused(_DRAFTING_FLAGS, DRAFT_MODEL_FLAG),),
    "--speculative-decoding-mode": (Refused(_DRAFTING_FLAGS, DRAFT_MODEL_FLAG),),
    # running
    "--kv-cache-enable-block-reuse": (
        Noted("prompts that begin alike share keys and values; --no-kv-cache-reuse forbids it", "--no-kv-cache-reuse"),
        Noted("on a GPU, prompts that begin alike share keys and values", RUNNING),
    ),
    "--enable-chunked-context": (
        Noted("long prompts are read in pieces; --no-chunked-context forbids it", "--no-chunked-context"),
    ),
    "--max-tokens-in-paged-kv-cache": (Refused("--kv-cache-free-gpu-memory-fraction X", RUNNING),),
    "--tp-size": (Refused(_TORCHRUN, LOADING), Refused(_TORCHRUN, SERVING)),
    "--tensor-parallel-size": (Refused(_TORCHRUN, LOADING), Refused(_TORCHRUN, SERVING)),
    "--use-py-session": (Noted("there is one session, in Python", RUNNING),),
    "--run-profiling": (Noted("speed is always printed; `redrafter bench` measures it", GENERATING),),
    "--log-level": (Noted("speed and tokens per step are always printed", GENERATING, word_count=1),),
    # llgtrt
    "--print-complete-config": (Alias("--print-config"),),
    # convert_checkpoint.py
    "--use-parallel-embedding": (Noted(_EMBEDDING_LAYOUT, CONVERTING),),
    "--embedding-sharding-dim": (Noted(_EMBEDDING_LAYOUT, CONVERTING, word_count=1),),
    "--load-model-on-cpu": (Noted("tensors are read from the files, a few rows at a time", CONVERTING),),
    "--storage-type": (Noted("--dtype says the number format", CONVERTING, word_count=1),),
    "-t": (Noted("--dtype says the number format", CONVERTING, word_count=1),),
    "--dense-context-fmha": (Noted("no kernels are chosen when converting", CONVERTING),),
}
