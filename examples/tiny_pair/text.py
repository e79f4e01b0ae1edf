"""Stage `text`: the base continues training prompts, in this library's own engine.

A drafter has to guess what its base would write, not what people wrote, so it learns mostly from this text. Half of
the rows are greedy and half are drawn, at temperatures spread over what people use.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import prompts, read_rows
from recipe import Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from redrafter import Engine
from redrafter.drafting.proposer import PlainProposer
from redrafter.target.target import Target

TEMPERATURES = (0.4, 0.7, 1.0, 1.0)


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Write `ids.npy`, uint16 `[rows, prompt + new]` padded at the end, and `length.npy`, int32 `[rows]`."""
    base = Path(recipe.out) / "base"
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    dtype = torch.bfloat16 if recipe.torch_device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(recipe.torch_device)
    engine = Engine(Target(model), PlainProposer())
    rows = read_rows(recipe.data, recipe.exclude)
    starts = prompts(rows, tokenizer, recipe.text_rows, split="train", tokens=recipe.text_prompt, seed=recipe.seed)
    starts = [start["ids"] for start in starts if len(start["ids"]) <= recipe.text_prompt]
    width = recipe.text_prompt + recipe.text_new
    ids, lengths = [], []
    for first in range(0, len(starts), recipe.text_batch):
        part = starts[first : first + recipe.text_batch]
        batch = tokenizer.pad({"input_ids": part}, return_tensors="pt")
        greedy = first // recipe.text_batch % 2 == 0
        how: dict[str, Any] = {"do_sample": False}
        if not greedy:
            spread = [TEMPERATURES[row % len(TEMPERATURES)] for row in range(len(part))]
            how = {"do_sample": True, "temperature": spread, "top_k": 0, "seed": recipe.seed + first}
        out = engine.generate(batch.input_ids, batch.attention_mask, max_new_tokens=recipe.text_new, **how)
        for start, text in zip(part, out[:, batch.input_ids.shape[1] :].tolist(), strict=True):
            end = text.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in text else len(text)
            ids.append((start + text[:end] + [tokenizer.pad_token_id] * width)[:width])
            lengths.append(len(start) + end)
    into.mkdir()
    np.save(into / "ids.npy", np.array(ids, dtype=np.uint16))
    np.save(into / "length.npy", np.array(lengths, dtype=np.int32))
    return {"rows": len(ids), "own_tokens": int(sum(lengths) - sum(map(len, starts)))}
