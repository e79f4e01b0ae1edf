"""Stage `drafter`: distil the base into its drafter, on the base's own text mixed with the corpus."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from base import Windows
from recipe import Recipe
from transformers import AutoModelForCausalLM

from redrafter import DrafterConfig
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.data.windows import Document
from redrafter.data.windows import Windows as PackedWindows
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train

NAME = "redrafter-tiny-base"


def texts(recipe: Recipe, bos: int) -> Iterator[Document]:
    """Yield what stage `text` wrote, then windows of the corpus, so that `drafter_own` of all tokens are the base's."""
    out = Path(recipe.out)
    ids, lengths = np.load(out / "text" / "ids.npy"), np.load(out / "text" / "length.npy")
    for row, length in zip(ids, lengths.tolist(), strict=True):
        yield Document(row[:length].tolist(), [True] * length)
    corpus = Windows(recipe, out / "tokens", bos, recipe.drafter_length)
    corpus.weight = corpus.weight.sqrt()  # as in stage `text`
    left = int(lengths.sum() * (1 / recipe.drafter_own - 1))
    for row in corpus.draw(left // corpus.length).tolist():
        yield Document(row, [True] * len(row))


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Train the drafter and save it in bf16, which is half the bytes of float32."""
    on_gpu = recipe.torch_device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(Path(recipe.out) / "base", dtype=dtype)
    model.requires_grad_(False)
    bos = model.config.bos_token_id
    rows = PackedWindows(texts(recipe, bos), recipe.drafter_length, bos)
    config = TrainConfig(
        steps=recipe.drafter_steps or None,
        minutes=None if recipe.drafter_steps else recipe.drafter_minutes,
        draft_len=recipe.drafter_len,
        distill=recipe.drafter_distill,
        lr=recipe.drafter_lr,
        compile=on_gpu and recipe.compile != "off",
        mixed_precision="bf16" if on_gpu else "no",
        cpu=not on_gpu,
        seed=recipe.seed,
        log_every=200,
    )
    architecture = DrafterConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        exit_dim=recipe.drafter_exit or None,
        num_draft_layers=recipe.drafter_layers,
        recurrence="gated",
        target_layers=recipe.drafter_fused,
        context_window=recipe.drafter_context,
        context_heads=recipe.drafter_context_heads,
        context_kv_heads=recipe.drafter_context_kv_heads,
        context_head_dim=recipe.drafter_context_head_dim,
        head_rank=recipe.drafter_rank or None,
        draft_len_per_beam=recipe.drafter_len,
    )
    drafter = new_drafter(model, config, architecture=architecture)
    result = train(model, drafter, rows.batches(recipe.drafter_batch, recipe.seed), config)
    drafter.config.update(
        {
            "base_model": NAME,
            "base_embedding_norms": embedding_norms(model.get_input_embeddings().weight),
            "trained_draft_len": recipe.drafter_len,
            "draft_beams": recipe.drafter_beams,
        }
    )
    drafter.to(torch.bfloat16).save_pretrained(into)
    saved = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(saved | {"dtype": "float32"}, indent=2) + "\n")
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "steps": result.step,
        "tokens": result.tokens,
        "loss": result.loss,
        "accuracy_by_depth": result.accuracy,
    }
