"""Stage `pair`: base and drafter as one merged checkpoint, with model cards that hold the measurements."""

import json
from pathlib import Path
from typing import Any

from drafter import NAME
from recipe import Recipe

from redrafter.convert.config import ConvertConfig
from redrafter.convert.convert_checkpoint import convert

SOURCES = {
    "classic_books": ("English books published before 1923", "public domain (US)"),
    "peps": ("Python enhancement proposals, github.com/python/peps", "public domain / CC0-1.0"),
    "eips": ("Ethereum improvement proposals, github.com/ethereum/EIPs", "CC0-1.0"),
    "rust_rfcs": ("github.com/rust-lang/rfcs", "MIT or Apache-2.0"),
    "rust_book": ("github.com/rust-lang/book", "MIT or Apache-2.0"),
    "rust_reference": ("github.com/rust-lang/reference", "MIT or Apache-2.0"),
    "swift_evolution": ("github.com/swiftlang/swift-evolution", "Apache-2.0"),
    "algorithms_python": ("github.com/TheAlgorithms/Python", "MIT"),
    "gsm8k": ("grade-school maths, github.com/openai/grade-school-math", "MIT"),
    "tldr": ("command help, github.com/tldr-pages/tldr", "CC-BY-4.0"),
    "taskmaster4": ("order dialogues, github.com/google-research-datasets/Taskmaster", "CC-BY-4.0"),
}


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Merge base and drafter, and replace the model cards."""
    out = Path(recipe.out)
    report = json.loads((out / "report.json").read_text())
    results = json.loads((out / "evaluation" / "results.json").read_text())
    sources = {"base_model_checkpoint_dir": str(out / "base"), "drafter_model_dir": str(out / "drafter")}
    convert(ConvertConfig(**sources, output_dir=str(into)))
    (into / "README.md").write_text(base_card(report))
    (into / "drafter" / "README.md").write_text(drafter_card(report, results))
    return {"megabytes": round(sum(f.stat().st_size for f in into.rglob("*") if f.is_file()) / 1e6, 2)}


def base_card(report: dict[str, Any]) -> str:
    """Write the base's model card: its size, its data and its loss."""
    base, settings = report["base"], report["base"]["settings"]
    losses = {name: found["nats_per_token"] for name, found in base["val"].items()}
    sources = "\n".join(
        f"| {name} | {what} | {licence} | {losses.get(name, '-')} |" for name, (what, licence) in SOURCES.items()
    )
    return f"""---
license: apache-2.0
language: en
library_name: transformers
tags: [text-generation, redrafter]
---

# redrafter-tiny-base

A small Llama-shaped language model to try speculative decoding on, with its drafter in `drafter/`. It babbles: it is
for measuring and for tests, not for use. Deep and narrow, so that on a CPU a forward over a dozen tokens costs little
more than one over a single token.

- {base["parameters"]:,} parameters: {settings["base_layers"]} layers, hidden size {settings["base_hidden"]}, \
{settings["base_heads"]} query heads and {settings["base_kv_heads"]} key/value head of {settings["base_head_dim"]}, \
MLP {settings["base_intermediate"]}, {report["tokenizer"]["settings"]["tokenizer_vocab"]}-token byte-level BPE, \
context {settings["base_positions"]}, tied head. Stored in bf16, loaded in float32 unless asked otherwise.
- Trained by `examples/tiny_pair` on {base["tokens_seen"]:,} tokens in {base["train_seconds"]:.0f} s on \
{base["hardware"]["gpu"] or "a CPU"}; seed {settings["seed"]}.
- Chat template: `<|user|>\\n...\\n<|assistant|>\\n...`.

| source | what | licence | held-out loss, nats per token |
|---|---|---|---|
{sources}
"""


def drafter_card(report: dict[str, Any], results: dict[str, Any]) -> str:
    """Write the drafter's model card: its base, its data and its tokens per step."""
    drafter, evaluation = report["drafter"], report["evaluation"]
    rows = "\n".join(
        f"| {name} | " + " | ".join(f"{found['all']:.2f}" for found in at.values()) + " |"
        for name, at in results["tokens_per_step"].items()
    )
    best = results["tokens_per_step"]["lattice, coupled"]["T=0"]["by_source"]
    return f"""---
license: apache-2.0
base_model: {NAME}
library_name: redrafter
tags: [redrafter, speculative-decoding]
---

# Recurrent drafter for {NAME}

Fits this base and no other. {drafter["parameters"]:,} parameters, {report["base"]["parameters"]:,} in the base. \
Trained by `examples/tiny_pair` for {drafter["steps"]} steps on {report["text"]["own_tokens"]:,} tokens that the base \
wrote itself, mixed with the base's own corpus (sources and licences: the base's card), by distillation over \
{drafter["settings"]["drafter_len"]} draft steps, each of which attends to the last \
{drafter["settings"]["drafter_context"]} tokens.

Tokens per step on {evaluation["prompts"]} held-out prompts, {drafter["settings"]["drafter_beams"]} beams x \
{drafter["settings"]["drafter_len"]} tokens, all nodes, float32, \
{evaluation["settings"]["evaluation_new"]} new tokens, \
{evaluation["hardware"]["gpu"] or "CPU"}, torch {evaluation["versions"]["torch"]}, transformers \
{evaluation["versions"]["transformers"]}, seeds from 1000:

| tree | greedy | T=0.5 | T=1 |
|---|---|---|---|
{rows}

Greedy, by source: {", ".join(f"{source} {value:.2f}" for source, value in best.items())}.
"""
