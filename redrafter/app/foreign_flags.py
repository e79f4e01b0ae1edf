"""Flags of TensorRT-LLM's scripts of ReDrafter and draft-target decoding, of its server llgtrt, and of other commands.

A flag is translated to an option of the command, or accepted with a note where nothing corresponds to it. The flags of
vLLM, SGLang, llama.cpp and transformers' `Trainer` are in docs/migration.md. `redrafter.app.parser` applies the tables.
"""

# Names use dashes. A flag becomes the first that the command has of: options, options with the value of a switch, and
# names of positional arguments.
ALIASES = {
    "--model": ("--base-model-checkpoint-dir", "model"),
    **dict.fromkeys(("--model-dir", "--hf-model-dir"), ("--model", "--base-model-checkpoint-dir", "model")),
    "--drafter": ("--drafter-model-dir",),
    **dict.fromkeys(("--data-type", "--hf-data-type"), ("--dtype",)),
    "--lora-dir": ("--adapter",),
    "--input-text": ("prompts",),
    "--dataset": ("--prompts", "--data"),
    **dict.fromkeys(("--max-output-len", "--output-len"), ("--max-new-tokens",)),
    "--max-new-tokens": ("--new-tokens",),
    "--output": ("--output-dir",),
    "--random-seed": ("--seed",),
    **dict.fromkeys(("--tp", "--tp-size"), ("--tensor-parallel-size",)),
    "--stop-words": ("--stop",),
    "--num-draft-tokens": ("--draft-len",),
    **dict.fromkeys(("--use-logits", "--use-draft-logits"), ("--acceptance=rejection",)),
    "--print-complete-config": ("--print-config",),
    "--redrafter-no-greedy-search": ("--redrafter-greedy-search=False",),
}
REPEATED = ("--input-text", "--stop-words")  # several words may follow; the option is given for each
