"""What flags of TensorRT-LLM's programs, and of its server llgtrt, mean in the commands here: one table for all.

The programs are `run.py`, the scripts and clients of ReDrafter and of draft-target decoding, and `trtllm-build`. A flag
is honoured where an option here says the same, accepted with a note where it is not needed, and else refused by a line
that names what to type here.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["FLAGS", "Meaning", "Needless", "Other", "Same", "Words", "meaning_of", "meanings", "owner", "translated"]

MANY = 1 << 20  # words, of a flag that takes all up to the next one


@dataclass(frozen=True)
class Same:
    """Honoured: it says what `option` says. value: what it stands for, of a switch. each: several words may follow it,
    and the option takes them one by one."""

    option: str
    value: str | None = None
    each: bool = False

    def fits(self, parser: argparse.ArgumentParser) -> bool:
        return _has(parser, self.option)


@dataclass(frozen=True)
class Words:
    """Honoured: the words after it are what the command takes without a flag."""

    name: str

    def fits(self, parser: argparse.ArgumentParser) -> bool:
        return any(action.dest == self.name and not action.option_strings for action in parser._actions)


@dataclass(frozen=True)
class Needless:
    """Accepted with a note. values: how many words follow it. having: an option of the commands that this is about."""

    why: str
    having: str
    values: int = 0

    def fits(self, parser: argparse.ArgumentParser) -> bool:
        return _has(parser, self.having)


@dataclass(frozen=True)
class Other:
    """Refused. here: what to type in its place. having: an option of the commands that this is about."""

    here: str
    having: str

    def fits(self, parser: argparse.ArgumentParser) -> bool:
        return _has(parser, self.having)


Meaning = Same | Words | Needless | Other

# Options by which commands are told apart.
WRITE, PRINT, LOAD, SERVE, CONVERT = "--max-new-tokens", "--color", "--model", "--host", "--base-model-checkpoint-dir"
RUN, DRAFT_MODEL = "--kv-cache-free-gpu-memory-fraction", "--draft-model"

_LLGTRT = ("--engine", "--tokenizer", "--lora-root", "--print-complete-config")

_NO_ENGINE = "a Hugging Face model or a merged checkpoint: no engine is built"
_NO_BEAM_SEARCH = "nothing: beam search cannot be drafted for exactly, and --num-beams is the drafter's"
_NO_FILES = "--json, which prints texts and counts; generate(output_logits=True) in Python returns logits"
_OTHER_DRAFTS = "--drafter, --draft-model or --prompt-lookup: what drafts"
_LAYOUT = "each rank holds the whole embedding table"

# Names have dashes between their words; the first meaning that fits a command counts.
FLAGS: dict[str, tuple[Meaning, ...]] = {
    # models
    "--model": (Words("model"),),
    "--model-dir": (Same("--model"), Same(CONVERT), Words("model")),
    "--hf-model-dir": (Same("--model"), Same(CONVERT), Words("model")),
    "--engine-dir": (
        Other(f"--model DIR, {_NO_ENGINE}", LOAD),
        Other(f"MODEL, {_NO_ENGINE}", SERVE),
        Other("--base-model-checkpoint-dir DIR: an engine holds no weights that can be read", CONVERT),
    ),
    "--engine": (Other(f"MODEL, {_NO_ENGINE}", SERVE), Other(f"--model DIR, {_NO_ENGINE}", LOAD)),
    "--draft-engine-dir": (Other("--draft-model DIR, a Hugging Face model with the same tokenizer", DRAFT_MODEL),),
    "--tokenizer-dir": (Other("leave it out: the tokenizer is the one beside the model", RUN),),
    "--tokenizer": (Other("leave it out: the tokenizer is the one beside the model", RUN),),
    "--data-type": (Other("--dtype float16, bfloat16 or float32", "--dtype"),),
    "--hf-data-type": (Other("--dtype float16, bfloat16 or float32", "--dtype"),),
    "--lora-dir": (Other("leave it out: merge the adapter into the model first (peft's merge_and_unload)", RUN),),
    "--lora-root": (Other("leave it out: merge the adapter into the model first (peft's merge_and_unload)", SERVE),),
    # prompts
    "--input-text": (Words("prompts"), Other("--prompts FILE, one prompt a line", "--prompts")),
    "--input-file": (
        Other("--file FILE, a text file with one prompt a line", "--file"),
        Other("--prompts FILE, one prompt a line", "--prompts"),
    ),
    "--dataset": (
        Same("--prompts"),
        Other(
            "--file FILE, a text file with one prompt a line; `redrafter compare --dataset FILE` takes JSON", "--file"
        ),
    ),
    "--max-input-length": (Other("--max-input-len N, which refuses longer prompts and cuts none", "--max-input-len"),),
    "--no-prompt-template": (Needless("prompts go in as they are, but for --chat-template", "--chat-template"),),
    # writing
    "--max-output-len": (Same("--max-new-tokens"),),
    "--output-len": (Same("--max-new-tokens"),),
    "--random-seed": (Same("--seed"),),
    "--stop-words": (Same("--stop", each=True),),
    "--end-id": (Other("--stop-token-ids N, which ends a text beside the model's own", "--stop-token-ids"),),
    "--length-penalty": (Other(_NO_BEAM_SEARCH, WRITE),),
    "--early-stopping": (Other(_NO_BEAM_SEARCH, WRITE),),
    "--beam-search-diversity-rate": (Other(_NO_BEAM_SEARCH, WRITE),),
    "--streaming": (
        Needless("text is printed as it is made", PRINT),
        Other('"stream": true in a request', SERVE),
    ),
    "--streaming-interval": (Needless("each step's text is printed as it is made", PRINT, values=1),),
    "--output-generation-logits": (Needless("drafts are accepted by logits without it", WRITE),),
    "--output-logits-npy": (Other(_NO_FILES, PRINT),),
    "--output-log-probs-npy": (Other(_NO_FILES, PRINT),),
    "--output-cum-log-probs-npy": (Other(_NO_FILES, PRINT),),
    "--output-csv": (Other(_NO_FILES, PRINT),),
    "--output-npy": (Other(_NO_FILES, PRINT),),
    # drafting
    "--max-draft-len": (
        Other("--draft-len N of a draft model, or --draft-len-per-beam N of a drafter", DRAFT_MODEL),
        Other("--draft-len-per-beam N", "--draft-len-per-beam"),
        Other("--redrafter-draft-len-per-beam N", CONVERT),
    ),
    "--num-draft-tokens": (Same("--draft-len"),),
    "--use-logits": (Same("--acceptance", value="rejection"),),
    "--use-draft-logits": (Same("--acceptance", value="rejection"),),
    "--prompt-lookup-config": (Other("--prompt-lookup --draft-len N --ngram N", "--prompt-lookup"),),
    "--ngram-config": (Other("--prompt-lookup --draft-len N --ngram N", "--prompt-lookup"),),
    "--medusa-choices": (Other(_OTHER_DRAFTS, DRAFT_MODEL),),
    "--eagle-choices": (Other(_OTHER_DRAFTS, DRAFT_MODEL),),
    "--lookahead-config": (Other(_OTHER_DRAFTS, DRAFT_MODEL),),
    "--speculative-decoding-mode": (Other(_OTHER_DRAFTS, DRAFT_MODEL),),
    # running
    "--kv-cache-enable-block-reuse": (
        Needless(
            "prompts that begin alike share keys and values; --no-kv-cache-reuse forbids it", "--no-kv-cache-reuse"
        ),
        Needless("on a GPU, prompts that begin alike share keys and values", RUN),
    ),
    "--enable-chunked-context": (
        Needless("long prompts are read in pieces; --no-chunked-context forbids it", "--no-chunked-context"),
    ),
    "--kv-cache-dtype": (Other("--dtype: keys and values have the model's number format", RUN),),
    "--max-tokens-in-paged-kv-cache": (Other("--kv-cache-free-gpu-memory-fraction X", RUN),),
    "--use-py-session": (Needless("there is one session, in Python", RUN),),
    "--run-profiling": (Needless("speed is always printed; `redrafter bench` measures it", WRITE),),
    "--log-level": (Needless("speed and tokens per step are always printed", WRITE, values=1),),
    # llgtrt
    "--print-complete-config": (Same("--print-config"),),
    # convert_checkpoint.py
    "--use-parallel-embedding": (Needless(_LAYOUT, CONVERT),),
    "--embedding-sharding-dim": (Needless(_LAYOUT, CONVERT, values=1),),
    "--load-model-on-cpu": (Needless("tensors are read from the files, a few rows at a time", CONVERT),),
    "--storage-type": (Needless("--dtype says the number format", CONVERT, values=1),),
    "-t": (Needless("--dtype says the number format", CONVERT, values=1),),
    "--dense-context-fmha": (Needless("no kernels are chosen when converting", CONVERT),),
}


def meanings(word: str) -> tuple[Meaning, ...]:
    """Return what a word of a command line may mean by the table: nothing, where it is no flag in it."""
    name = word.partition("=")[0]
    return FLAGS.get(name.replace("_", "-"), ())


def meaning_of(word: str, parser: argparse.ArgumentParser) -> Meaning | None:
    """Return what a flag means to a command that has no such option; None where the table says nothing."""
    if _has(parser, word.partition("=")[0]):
        return None
    return next((each for each in meanings(word) if each.fits(parser)), None)


def owner(word: str) -> str:
    """Return whose flag in the table it is, to be named in a message."""
    return "llgtrt's" if word.partition("=")[0].replace("_", "-") in _LLGTRT else "TensorRT-LLM's"


def translated(args: Sequence[str], parser: argparse.ArgumentParser, note: Callable[[str], object]) -> list[str]:
    """Return a command line in the options here. note: told what is accepted and not needed.

    What is refused ends the program, by `parser.error`.
    """
    found, words = list[str](), list(args)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*found, word, *words]
        name, equals, value = word.partition("=")
        meaning = meaning_of(word, parser)
        if meaning is None:
            found.append(word)
            continue
        if isinstance(meaning, Other):
            parser.error(f"{name} is {owner(name)}; here: {meaning.here}")
        given = [value] if equals else _following(words)
        taken = given if equals else given[: _taken(meaning, parser)]
        if equals and not _taken(meaning, parser):
            parser.error(f"{name} is a switch and takes no value, got {value!r}")
        if _taken(meaning, parser) and not taken:
            parser.error(f"argument {name}: expected a value")
        if not equals:
            del words[: len(taken)]
        if isinstance(meaning, Needless):
            note(f"{name} is {owner(name)}; not needed here: {meaning.why}")
        elif isinstance(meaning, Words):
            found += taken
        elif meaning.value is None and not taken:
            found.append(meaning.option)
        else:
            found += [f"{meaning.option}={each}" for each in ([meaning.value] if meaning.value is not None else taken)]
    return found


def _following(words: Sequence[str]) -> list[str]:
    """The words up to the next flag."""
    ends = (index for index, word in enumerate(words) if word.startswith("-") and " " not in word)
    return list(words[: next(ends, len(words))])


def _taken(meaning: Needless | Words | Same, parser: argparse.ArgumentParser) -> int:
    """How many of the words behind a flag are its own, at most."""
    if isinstance(meaning, Needless):
        return meaning.values
    if isinstance(meaning, Words):
        return MANY
    if meaning.value is not None or parser._option_string_actions[meaning.option].nargs == 0:
        return 0
    return MANY if meaning.each else 1


def _has(parser: argparse.ArgumentParser, option: str) -> bool:
    return option.replace("_", "-") in parser._option_string_actions
