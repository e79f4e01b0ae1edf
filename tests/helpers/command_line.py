"""Tiny tokenizers and checkpoints for tests of the commands, and a check that a command fails with one line."""

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from helpers.models import tiny_model
from redrafter import DrafterConfig, RecurrentDrafter
from redrafter.cli import main
from redrafter.convert.config import ConvertConfig
from redrafter.convert.convert_checkpoint import convert
from redrafter.tree.sizes import TreeShape

SPECIAL = ["<pad>", "<bos>", "<eos>"]
TEXT = "Zürich: 10 € für 日本 🙂, ja! "
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per byte, so that non-ASCII characters are split; texts begin with `<bos>`."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        "<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names)


def ran(*args: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, and what it wrote to stdout and stderr."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = main(list(args))
        except SystemExit as end:  # argparse
            code = end.code
    return code, out.getvalue(), err.getvalue()


def measured(*args: str, code: int = 0) -> tuple[list[dict], str]:
    """Run a command that measures; return the records of its `--json` file, and what it printed."""
    with TemporaryDirectory() as folder:
        found, out, err = ran(*args, "--json", f"{folder}/records.jsonl")
        assert found == code, err
        return [json.loads(line) for line in Path(folder, "records.jsonl").read_text().splitlines()], out


def printed(*args: str) -> dict:
    """Run a command that prints one JSON document; return it."""
    code, out, err = ran(*args)
    assert code == 0, err
    return json.loads(out)


def fails(capsys, *args: str) -> str:
    """Run a command that must end with one line on stderr and exit code 2; return that line."""
    code, out, err = ran(*args)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"redrafter: error: .+\n", err), err
    return err


CONTEXT, NEW = 160, 48  # the model's context, and new tokens of a run


def byte_fallback_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer like sentencepiece's: words have their leading space, unknown characters are bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = [*SPECIAL, *bytes_, "▁Hello", "▁world", "▁", "!"]
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(vocabulary)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"pad_token": "<pad>", "eos_token": "<eos>"})


def make_pair(folder: Path) -> Path:
    """Write a tiny base, drafters for it and draft models into a folder, and return the folder.

    `base` was trained on TEXT; `drafter` is untrained and drafts only bytes of TEXT; `merged` is the two. `small` is a
    draft model that was trained less; `foreign` is the same with another tokenizer.
    """
    tokenizer = byte_tokenizer()
    text = tokenizer(TEXT * 3, return_tensors="pt").input_ids
    model = _trained(text, 40, vocab_size=len(tokenizer), num_hidden_layers=1)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    small = _trained(text, 30, vocab_size=len(tokenizer) + 5, num_hidden_layers=1, hidden_size=16)
    for name, small_tokenizer in (("small", tokenizer), ("foreign", byte_fallback_tokenizer())):
        small.save_pretrained(folder / name)
        small_tokenizer.save_pretrained(folder / name)

    ids = text.unique()
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": model.config.hidden_size, "draft_vocab_size": len(ids)}
    drafter = RecurrentDrafter(DrafterConfig(**sizes, trained_draft_len=5))
    drafter.draft_ids.copy_(ids)
    drafter.save_pretrained(folder / "drafter")
    merge(folder / "base", folder / "drafter", folder / "merged")
    return folder


def _trained(text: torch.Tensor, steps: int, **changes: int) -> PreTrainedModel:
    """Return a tiny model that was trained on a text for so many steps."""
    model = tiny_model("llama", max_position_embeddings=CONTEXT, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model.train()(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make a text what the command reads from stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def merge(base: Path, drafter: Path, output: Path, shape: TreeShape | None = None, overwrite: bool = False) -> Path:
    """Write a merged checkpoint of a model directory and a drafter directory, and return its path."""
    shape = shape or TreeShape()
    convert(
        ConvertConfig(
            base_model_checkpoint_dir=str(base),
            drafter_model_dir=str(drafter),
            output_dir=str(output),
            redrafter_num_beams=shape.num_beams,
            redrafter_draft_len_per_beam=shape.draft_len_per_beam,
            node_budget=shape.node_budget,
            overwrite=overwrite,
        )
    )
    return output
