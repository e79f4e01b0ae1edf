"""Map flags of other programs, and of other `redrafter` commands, to their meaning for the current command.

The programs belong to TensorRT-LLM (`run.py`, the scripts and clients of ReDrafter and of draft-target decoding,
`trtllm-build`), its server llgtrt, vLLM, SGLang, llama.cpp and scripts on transformers' `Trainer`. A flag is
translated to an equivalent option, accepted with a note if it is not needed, or rejected with an error that says what
to type instead. `redrafter.app.parser` applies the table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Alias:
    """A flag that is translated to an equivalent option."""

    option: str  # equivalent option
    value: str | None = None  # of the option, for a flag that is a switch
    repeated: bool = False  # whether several words may follow the flag; the option is then repeated for each


@dataclass(frozen=True)
class Positional:
    """A flag whose words become positional arguments of the command."""

    name: str  # of the positional argument


@dataclass(frozen=True)
class Noted:
    """A flag that has no effect and is accepted with a note."""

    reason: str  # why it has no effect, for the note
    for_option: str  # applies only to commands with this option
    word_count: int = 0  # words that follow the flag


@dataclass(frozen=True)
class Refused:
    """A flag that ends the program with an error."""

    instead: str  # replacement that the error message suggests
    for_option: str  # applies only to commands with this option


FlagMeaning = Alias | Positional | Noted | Refused

# Each of these options identifies one group of commands, since no other command has it.
GENERATING, PRINTING, LOADING, SERVING = "--max-new-tokens", "--color", "--model", "--host"
CONVERTING, RUNNING = "--base-model-checkpoint-dir", "--kv-cache-free-gpu-memory-fraction"
DRAFT_MODEL_FLAG = "--draft-model"

_NO_ENGINE = "a Hugging Face model or a merged checkpoint: no engine is built"
_NO_BEAM_SEARCH = "nothing: beam search cannot be drafted for exactly, and --num-beams is the drafter's"
_NO_FILES = "--json, which prints texts and counts; generate(output_logits=True) in Python returns logits"
_DRAFTING = (
    Refused("--drafter, --draft-model or --prompt-lookup: what drafts", "--prompt-lookup"),
    Refused("--drafter or --draft-model: what drafts", DRAFT_MODEL_FLAG),
)
_TORCHRUN = "torchrun --nproc-per-node N -m redrafter and the command: its processes share the model, without a flag"
_EMBEDDING_LAYOUT = "each rank holds the whole embedding table"

_MODEL = (Alias("--model"), Alias(CONVERTING), Positional("model"))
_PROMPT = (
    Positional("prompts"),
    Refused("--prompts FILE, one prompt a line", "--prompts"),
    Refused("a turn on stdin; --system TEXT is the system message", "--system"),
    Refused('"prompt" in a request', SERVING),
)
_NEW_TOKENS = (Alias(GENERATING), Alias("--new-tokens"), Refused('"max_tokens" in a request', SERVING))
_TEMPERATURE = (Alias("--temperature"), Alias("--temperatures"), Refused('"temperature" in a request', SERVING))
_SHARED = (Refused(_TORCHRUN, LOADING), Refused(_TORCHRUN, SERVING))
_REUSE = (
    Noted("prompts that begin alike share keys and values; --no-kv-cache-reuse forbids it", "--no-kv-cache-reuse"),
    Noted("on a GPU, prompts that begin alike share keys and values", RUNNING),
)
_GPU_SHARE = (Refused("--kv-cache-free-gpu-memory-fraction X, a share of what the model leaves free", RUNNING),)
_REPLICAS = (Refused("--ray --num-replicas N", "--num-replicas"),)
_ALL_LAYERS = (Noted("all layers are on one device; --device chooses it", "--device", word_count=1),)
_CHUNKED = (Noted("long prompts are read in pieces; --no-chunked-context forbids it", "--no-chunked-context"),)

# Names use dashes. A command uses the first meaning that applies to its options, so order the specific ones first.
_TRTLLM: dict[str, tuple[FlagMeaning, ...]] = {
    # models
    "--model-dir": _MODEL,
    "--hf-model-dir": _MODEL,
    "--engine-dir": (
        Refused(f"--model DIR, {_NO_ENGINE}", LOADING),
        Refused(f"MODEL, {_NO_ENGINE}", SERVING),
        Refused("--base-model-checkpoint-dir DIR: an engine holds no weights that can be read", CONVERTING),
    ),
    "--draft-engine-dir": (Refused("--draft-model DIR, a Hugging Face model", DRAFT_MODEL_FLAG),),
    "--tokenizer-dir": (Refused("leave it out: the tokenizer is loaded from the model's directory", RUNNING),),
    "--data-type": (Alias("--dtype"),),
    "--hf-data-type": (Alias("--dtype"),),
    "--lora-dir": (Alias("--adapter"), Refused("--lora-modules NAME=DIR", "--lora-modules")),
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
        Alias("--data"),
    ),
    "--max-input-length": (
        Refused("--max-input-len N, which refuses longer prompts and cuts none", "--max-input-len"),
    ),
    "--no-prompt-template": (Noted("prompts go in as they are, but for --chat", "--chat"),),
    # writing
    "--max-output-len": (Alias("--max-new-tokens"),),
    "--output-len": (Alias("--max-new-tokens"),),
    "--random-seed": (Alias("--seed"),),
    "--stop-words": (Alias("--stop", repeated=True),),
    "--end-id": (Refused("--stop-token-ids N, which end a text in addition to the model's own", "--stop-token-ids"),),
    "--length-penalty": (Refused(_NO_BEAM_SEARCH, GENERATING),),
    "--early-stopping": (Refused(_NO_BEAM_SEARCH, GENERATING),),
    "--beam-search-diversity-rate": (Refused(_NO_BEAM_SEARCH, GENERATING),),
    "--streaming": (Noted("text is printed as it is made", PRINTING), Refused('"stream": true in a request', SERVING)),
    "--streaming-interval": (Noted("each step's text is printed as it is made", PRINTING, word_count=1),),
    "--output-generation-logits": (Noted("drafts are accepted by logits without it", GENERATING),),
    "--output-logits-npy": (Refused(_NO_FILES, "--num-return-sequences"),),
    "--output-log-probs-npy": (Refused(_NO_FILES, "--num-return-sequences"),),
    "--output-cum-log-probs-npy": (Refused(_NO_FILES, "--num-return-sequences"),),
    "--output-csv": (Refused(_NO_FILES, "--num-return-sequences"),),
    "--output-npy": (Refused(_NO_FILES, "--num-return-sequences"),),
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
    "--medusa-choices": _DRAFTING,
    "--eagle-choices": _DRAFTING,
    "--lookahead-config": _DRAFTING,
    "--speculative-decoding-mode": _DRAFTING,
    # running
    "--kv-cache-enable-block-reuse": _REUSE,
    "--enable-chunked-context": _CHUNKED,
    "--max-tokens-in-paged-kv-cache": (Refused("--kv-cache-free-gpu-memory-fraction X", RUNNING),),
    "--tp-size": _SHARED,
    "--use-py-session": (Noted("there is one session, in Python", RUNNING),),
    "--run-profiling": (Noted("speed is always printed; `redrafter bench` measures it", GENERATING),),
    "--log-level": (Noted("speed and tokens per step are always printed", GENERATING, word_count=1),),
    # convert_checkpoint.py
    "--use-parallel-embedding": (Noted(_EMBEDDING_LAYOUT, CONVERTING),),
    "--embedding-sharding-dim": (Noted(_EMBEDDING_LAYOUT, CONVERTING, word_count=1),),
    "--load-model-on-cpu": (Noted("tensors are read from the files, a few rows at a time", CONVERTING),),
    "--storage-type": (Noted("--dtype says the number format", CONVERTING, word_count=1),),
    "-t": (Noted("--dtype says the number format", CONVERTING, word_count=1),),
    "--dense-context-fmha": (Noted("no kernels are chosen when converting", CONVERTING),),
}

# Flags by the program that defines them; messages print that name.
FLAGS: dict[str, dict[str, tuple[FlagMeaning, ...]]] = {
    "TensorRT-LLM": _TRTLLM,
    "llgtrt": {
        "--engine": (Refused(f"MODEL, {_NO_ENGINE}", SERVING), Refused(f"--model DIR, {_NO_ENGINE}", LOADING)),
        "--tokenizer": (Refused("leave it out: the tokenizer is loaded from the model's directory", RUNNING),),
        "--lora-root": (Refused("--lora-modules NAME=DIR for each adapter", "--lora-modules"),),
        "--print-complete-config": (Alias("--print-config"),),
    },
    "vLLM": {
        "--max-model-len": (Alias("--max-seq-len"),),
        "--max-num-seqs": (Alias("--max-batch-size"),),
        "--max-num-batched-tokens": (Alias("--max-num-tokens"),),
        "--gpu-memory-utilization": _GPU_SHARE,
        "--speculative-config": _DRAFTING,
        "--speculative-model": _DRAFTING,
        "--tensor-parallel-size": _SHARED,
        "--data-parallel-size": _REPLICAS,
        "--enable-lora": (
            Noted("--lora-modules NAME=DIR names adapters", "--lora-modules"),
            Noted("--adapter DIR names one", "--adapter"),
        ),
        "--enable-prefix-caching": _REUSE,
        "--no-enable-prefix-caching": (Alias("--no-kv-cache-reuse"),),
        "--enable-chunked-prefill": _CHUNKED,
    },
    "SGLang": {
        "--model-path": _MODEL,
        "--context-length": (Alias("--max-seq-len"),),
        "--max-running-requests": (Alias("--max-batch-size"),),
        "--disable-radix-cache": (Alias("--no-kv-cache-reuse"),),
        "--mem-fraction-static": _GPU_SHARE,
        "--speculative-algorithm": _DRAFTING,
        "--speculative-draft-model-path": _DRAFTING,
        "--tp": _SHARED,
        "--dp": _REPLICAS,
        "--dp-size": _REPLICAS,
    },
    "llama.cpp": {
        "-m": _MODEL,
        "-p": _PROMPT,
        "-n": _NEW_TOKENS,
        "--n-predict": _NEW_TOKENS,
        "-c": (Alias("--max-seq-len"),),
        "--ctx-size": (Alias("--max-seq-len"),),
        "--temp": _TEMPERATURE,
        "-md": (Alias(DRAFT_MODEL_FLAG),),
        "--model-draft": (Alias(DRAFT_MODEL_FLAG),),
        "--draft-max": (Alias("--draft-len"),),
        "-np": (Alias("--max-batch-size"),),
        "-ngl": _ALL_LAYERS,
        "--n-gpu-layers": _ALL_LAYERS,
    },
    "Hugging Face": {
        "--model-name-or-path": _MODEL,
        "--learning-rate": (Alias("--lr"),),
        "--num-train-epochs": (Alias("--epochs"),),
        "--max-steps": (Alias("--steps"),),
        "--per-device-train-batch-size": (Alias("--batch-size"),),
        "--gradient-accumulation-steps": (Alias("--accumulate"),),
        "--output-dir": (
            Refused("--output FILE", "--shard"),
            Refused("--output FILE", "--assisted"),
            Alias("--output"),
        ),
    },
    "another program": {"--prompt": _PROMPT, "--max-tokens": _NEW_TOKENS},
    "another command": {
        "--model": (Alias(CONVERTING), Positional("model")),
        "--drafter": (Alias("--drafter-model-dir"),),
        "--prompts": (
            Refused("--file FILE, a text file with one prompt a line, or prompts without a flag", "--file"),
            Refused("--data FILE, JSON lines", "--data"),
        ),
        "--file": (Alias("--prompts"),),
        "--max-new-tokens": _NEW_TOKENS[1:],
        "--temperature": _TEMPERATURE[1:],
        "--output": (Alias("--output-dir"),),
        "--out": (Alias("--output"), Alias("--output-dir")),
    },
}
