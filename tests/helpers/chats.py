"""A byte tokenizer, chat templates and conversations, for tests of training, data and grammars."""

import gzip
import json
import lzma
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# A template that writes a turn's thinking only while the turn is the last one, as Qwen3's does.
FORGETFUL = LLAMA_LIKE.replace("m.content }}", "(m.content if loop.last else m.content.split('</t>')[-1]) }}")
CHAT = {
    "conversations": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<t>hm</t>yes"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "no"},
    ]
}


def tiny_tokenizer(template: str | None = LLAMA_LIKE) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each byte and each special word."""
    specials = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = {word: index for index, word in enumerate([*specials, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = template
    return fast


def write(path: Path, rows: list[object]) -> str:
    """Write rows to a JSON Lines file, compressed by the name's ending; return the path."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt") as file:
        file.write(lines)
    return str(path)
