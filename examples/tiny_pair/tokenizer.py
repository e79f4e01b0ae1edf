"""Stage `tokenizer`: a byte-level BPE small enough that embeddings and head cost little beside the layers.

Digits stand alone, so that numbers are spelled the same everywhere. Any text comes back exactly.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data import Row, read_rows
from recipe import Recipe
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"]  # ids 0 to 5
MAX_DOCUMENT_CHARS = 50_000  # characters of one document that the sample takes

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def balanced(rows: list[Row], chars: int, seed: int) -> Iterator[str]:
    """Yield about `chars` characters of the train split, always from the source with the fewest so far."""
    left: dict[str, list[Row]] = {}
    for row in rows:
        if row["split"] == "train":
            left.setdefault(row["source"], []).append(row)
    for documents in left.values():
        random.Random(seed).shuffle(documents)
    taken = dict.fromkeys(left, 0)
    while taken and sum(taken.values()) < chars:
        source = min(taken, key=lambda name: taken[name])
        if not left[source]:
            chars -= taken.pop(source)  # used up: the others share what is still wanted
            continue
        row = left[source].pop()
        text = row["text"] if "text" in row else "\n".join(turn["content"] for turn in row["conversations"])
        taken[source] += len(text[:MAX_DOCUMENT_CHARS])
        yield text[:MAX_DOCUMENT_CHARS]


def train_bpe(texts: Iterator[str], vocab: int) -> Tokenizer:
    """Learn `vocab` tokens: the special ones, the 256 bytes, then merges. It encodes with `<|bos|>` in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", SPECIAL.index("<|bos|>"))]
    )
    return tokenizer


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Learn the tokenizer and write it to `into` in the form that `AutoTokenizer` reads."""
    rows = read_rows(recipe.data, recipe.exclude)
    sample = list(balanced(rows, recipe.tokenizer_chars, recipe.seed))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(iter(sample), recipe.tokenizer_vocab),
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        model_max_length=recipe.base_positions,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(into)
    return {"vocab": len(tokenizer), "learned_from_chars": sum(map(len, sample))}
