"""Stage `text`: the base continues openings of training texts.

A drafter has to guess what its base would write, not what people wrote, so it learns mostly from this text. Some of it
is greedy and the rest is drawn at temperature 1: greedy texts of so small a base soon repeat themselves, and from text
that does, little is learnt.
"""

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from base import Windows
from recipe import Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer
from writer import Writer

SHORTEST_PROMPT = 8  # tokens


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Write `ids.npy`, uint16 `[rows, text_length]`, and `length.npy`, int32 `[rows]`, where each row's text ends."""
    out, device = Path(recipe.out), recipe.torch_device
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(out / "base", dtype=dtype).to(device).eval()
    torch.manual_seed(recipe.seed)
    openings = Windows(recipe, out / "tokens", tokenizer.bos_token_id, recipe.text_prompt)
    openings.weight = openings.weight.sqrt()  # else hardly a text would begin like those of a small source
    writer = Writer(model, recipe.text_batch, recipe.text_length)
    place = torch.arange(recipe.text_length, device=device)
    ids, lengths, new = [], [], 0
    began = time.perf_counter()
    for batch in itertools.count():
        elapsed = time.perf_counter() - began
        if batch and (batch >= recipe.text_batches if recipe.text_batches else elapsed >= 60 * recipe.text_minutes):
            break
        prompts = openings.draw(recipe.text_batch)
        given = torch.randint(SHORTEST_PROMPT, recipe.text_prompt + 1, (recipe.text_batch,), device=device)
        temperature = (torch.rand(recipe.text_batch, device=device) >= recipe.text_greedy).float()
        texts = writer.write(prompts, given, temperature)  # [batch, text_length]
        ends = (texts == tokenizer.eos_token_id) & (place >= given[:, None])
        length = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, recipe.text_length)
        ids.append(texts.cpu().numpy().astype(np.uint16))
        lengths.append(length.cpu().numpy().astype(np.int32))
        new += int((length - given).sum())
    into.mkdir()
    np.save(into / "ids.npy", np.concatenate(ids))
    np.save(into / "length.npy", np.concatenate(lengths))
    return {"rows": sum(map(len, lengths)), "own_tokens": new, "tokens_per_second": round(new / elapsed)}
