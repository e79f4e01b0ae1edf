"""Stage `drafter`: distil the base into its drafter, on the base's own text mixed with the corpus."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokens
import torch
from recipe import Recipe
from torch import Tensor
from transformers import AutoModelForCausalLM

from redrafter.checkpoints.drafters import embedding_norms
from redrafter.train.train_drafter import TrainConfig, new_drafter, train

NAME = "redrafter-tiny-base"


def batches(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches: token ids `[B, T]` and which of them count, `[B, T]` bool, both on the device.

    The share `drafter_own` of the rows comes from stage `text`; the others are windows of the corpus.
    """
    out, device = Path(recipe.out), recipe.torch_device
    random = torch.Generator(device).manual_seed(recipe.seed)
    own = torch.from_numpy(np.load(out / "text" / "ids.npy").astype(np.int32)).to(device)  # [rows, T]
    length = torch.from_numpy(np.load(out / "text" / "length.npy")).to(device)
    stream = torch.from_numpy(tokens.load(out / "tokens", "train")[0].astype(np.int32)).to(device)
    offsets = torch.arange(own.shape[1], device=device)
    count = round(recipe.drafter_batch * recipe.drafter_own)
    while True:
        row = torch.randint(len(own), (count,), generator=random, device=device)
        rest = (recipe.drafter_batch - count, 1)
        start = torch.randint(len(stream) - own.shape[1], rest, generator=random, device=device)
        ids = torch.cat([own[row], stream[start + offsets]]).long()
        counts = torch.ones_like(ids, dtype=torch.bool)
        counts[:count] = offsets < length[row, None]
        yield ids, counts


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Train the drafter and save it in bf16, which is half the bytes of float32."""
    on_gpu = recipe.torch_device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(Path(recipe.out) / "base", dtype=dtype)
    model.requires_grad_(False)
    config = TrainConfig(
        steps=recipe.drafter_steps or None,
        minutes=None if recipe.drafter_steps else recipe.drafter_minutes,
        draft_len=recipe.drafter_len,
        num_layers=recipe.drafter_layers,
        exit_dim=recipe.drafter_exit or None,
        distill=recipe.drafter_distill,
        decay=recipe.drafter_decay,
        lr=recipe.drafter_lr,
        chunk=recipe.drafter_chunk,
        compile=on_gpu and recipe.compile != "off",
        mixed_precision="bf16" if on_gpu else "no",
        cpu=not on_gpu,
        seed=recipe.seed,
        log_every=200,
    )
    drafter = new_drafter(model, config)
    result = train(model, drafter, batches(recipe), config)
    drafter.config.update(
        {
            "base_model": NAME,
            "base_embedding_norms": embedding_norms(model.get_input_embeddings()),
            "trained_draft_len": recipe.drafter_len,
            "draft_beams": recipe.drafter_beams,
        }
    )
    drafter.to(torch.bfloat16).save_pretrained(into)
    saved = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(saved | {"dtype": "float32"}, indent=2) + "\n")
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "steps": result.steps,
        "tokens": result.tokens,
        "loss": result.loss,
        "accuracy_by_depth": result.accuracy,
    }
