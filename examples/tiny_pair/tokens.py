"""Stage `tokens`: every document as token ids, one flat uint16 array for each split.

`train.npy` and `val.npy` hold the documents end to end, grouped by source. `index.json` says, for each split and
source, which part of the array is its own (`start`, `end`), how many characters that was, and whether it is chat.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from data import read_rows, render
from recipe import Recipe
from transformers import AutoTokenizer, PreTrainedTokenizerBase

BATCH_CHARS = 8_000_000  # characters that the encoder's threads get at a time, which bounds the memory of the results


def load(folder: Path, split: str) -> tuple[np.ndarray, dict[str, dict[str, Any]]]:
    """Load the flat ids of a split, uint16 `[tokens]`, and its sources: name to `start`, `end`, `chars`, `chat`."""
    return np.load(folder / f"{split}.npy"), json.loads((folder / "index.json").read_text())[split]


def encode(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, int]:
    """Encode rendered documents on all cores. Returns flat ids, uint16 `[tokens]`, and the number of characters."""
    assert len(tokenizer) <= 2**16, "uint16 cannot hold these ids"
    parts, batch, waiting, chars = [np.empty(0, np.uint16)], [], 0, 0
    for text in texts:
        batch.append(text)
        waiting += len(text)
        if waiting >= BATCH_CHARS:
            parts.append(_encode_batch(batch, tokenizer))
            batch, waiting, chars = [], 0, chars + waiting
    return np.concatenate([*parts, _encode_batch(batch, tokenizer)]), chars + waiting


def _encode_batch(batch: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    longest_first = sorted(range(len(batch)), key=lambda i: -len(batch[i]))  # else one book keeps one core at the end
    encoded = tokenizer.backend_tokenizer.encode_batch_fast([batch[i] for i in longest_first], add_special_tokens=False)
    ids = dict(zip(longest_first, encoded, strict=True))
    return np.concatenate([np.empty(0, np.uint16), *(np.array(ids[i].ids, np.uint16) for i in range(len(batch)))])


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Encode both splits of the data into `into`."""
    tokenizer = AutoTokenizer.from_pretrained(Path(recipe.out) / "tokenizer")
    rows = read_rows(recipe.data, recipe.exclude)
    into.mkdir()
    index: dict[str, dict[str, dict[str, Any]]] = {}
    for split in ("train", "val"):
        flat, index[split] = [np.empty(0, np.uint16)], {}
        for source in sorted({row["source"] for row in rows if row["split"] == split}):
            documents = [row for row in rows if (row["source"], row["split"]) == (source, split)]
            ids, chars = encode((render(row, tokenizer) for row in documents), tokenizer)
            start = sum(map(len, flat))
            index[split][source] = {
                "start": start,
                "end": start + len(ids),
                "chars": chars,
                "chat": all("conversations" in row for row in documents),
            }
            flat.append(ids)
        np.save(into / f"{split}.npy", np.concatenate(flat))
    (into / "index.json").write_text(json.dumps(index, indent=2))
    return {
        f"{split}_{what}": count
        for split, sources in index.items()
        for what, count in (
            ("tokens", sum(s["end"] - s["start"] for s in sources.values())),
            ("chars_per_token", {k: round(s["chars"] / (s["end"] - s["start"]), 3) for k, s in sources.items()}),
        )
    }
