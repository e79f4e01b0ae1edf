"""The texts that are written on from: a file's, or sixteen that ship with the package.

Those are pieces of public-domain and CC0 sources (books published before 1923, PEPs, EIPs) that the boxed pair was not
trained on.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.errors import ArgumentError

__all__ = ["encode", "read_prompts"]


def read_prompts(name: str | None) -> list[str]:
    """From a .jsonl file with a "text" in each line, a .json list of {"input", "instruction"}, or a text file with one
    prompt a line; None: those that ship."""
    path = Path(str(resources.files("redrafter.bench"))) / "prompts.jsonl" if name is None else Path(name)
    try:
        # Only a line feed ends a line: JSON may hold what Unicode calls line separators.
        numbered = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read prompts from {path}: {error}") from error
    if path.suffix == ".json":
        return _instructions(path)
    lines = [(number, line.rstrip("\r")) for number, line in numbered if line.strip()]
    texts = [_text(line, f"line {n} of {path}") if path.suffix == ".jsonl" else line for n, line in lines]
    if not texts:
        raise ArgumentError(f"{path} holds no prompts")
    return texts


def _instructions(path: Path) -> list[str]:
    """As sets of instructions come: a prompt is the input and then the instruction."""
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise ArgumentError(f'{path} is not a list of {{"input", "instruction", "output"}}, or an empty one')
    texts = []
    for number, row in enumerate(rows, 1):
        parts = [row.get(name, "") for name in ("input", "instruction")] if isinstance(row, dict) else [None]
        if not all(isinstance(part, str) for part in parts) or not any(parts):
            raise ArgumentError(f'entry {number} of {path} has no "input" or "instruction"')
        texts.append(_encodable(" ".join(filter(None, parts)), f"entry {number} of {path}"))
    return texts


def _text(line: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{where} is not JSON: {error}") from error
    text = row.get("text", row.get("prompt")) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise ArgumentError(f'{where} has no "text"')
    return _encodable(text, where)


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{where} holds half a surrogate pair, which is no text") from error
    return text


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids. A text that brings its own beginning-of-text token gets no second one."""
    bos = tokenizer.bos_token
    own = [bos is not None and text.startswith(bos) for text in texts]
    ids = [tokenizer(text, add_special_tokens=not has).input_ids for text, has in zip(texts, own, strict=True)]
    if [] in ids:
        raise ArgumentError(f"prompt {ids.index([]) + 1} has no tokens")
    return ids
