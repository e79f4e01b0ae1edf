"""Calls of `generate` that are compared with others, and what collects what they give."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from helpers.models import paged

ON_BOTH_CACHES = pytest.mark.parametrize("on", [lambda engine: engine, paged], ids=["dense", "paged"])


def same_undrafted(engine: Any, *prompts: Any, **arguments: Any) -> Any:
    """Fail unless a call writes, scores included, what it writes without drafts; return what it gives with them."""
    found, expected = (engine.generate(*prompts, speculate=drafts, **arguments) for drafts in (True, False))
    if isinstance(found, Tensor):
        assert torch.equal(found, expected)
        return found
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        if getattr(found, name) is not None:
            mine, others = (torch.stack(getattr(out, name)) for out in (found, expected))
            torch.testing.assert_close(mine, others, atol=1e-4, rtol=1e-4)
    return found


def same_as_model(engine: Any, ids: Tensor, mask: Tensor | None = None, model: Any = None, **arguments: Any) -> Tensor:
    """Fail unless a greedy call writes what `model.generate` writes; return the text."""
    arguments = {"do_sample": False} | arguments
    expected = (model or engine.model).generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(engine.generate(ids, mask, **arguments), expected)
    return expected


def same_alone(engine: Any, ids: Tensor, mask: Tensor, texts: Tensor, **arguments: Any) -> None:
    """Fail unless each row of `texts` `[B, L]` is what its prompt gives alone; a list has an argument for each row."""
    for row, seen in enumerate(mask.bool()):
        own = {name: x[row] if name in ("seed", "temperature", "adapter") and isinstance(x, list) else x
               for name, x in arguments.items()}  # fmt: skip
        text = engine.generate(ids[row, seen][None], **own)[0, int(seen.sum()) :]
        assert torch.equal(text, texts[row, ids.shape[1] :][: len(text)])


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any] | None = None) -> list[Any]:
    """Let a function also note what it returns, or what `note(result, *arguments)` says of a call; return the notes."""
    notes: list[Any] = []
    function = getattr(owner, name)

    @wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        notes.append(result if note is None else note(result, *given))
        return result

    patch.setattr(owner, name, called)
    return notes


def letters() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose token i < 94 is one printable character; the last three are pairs."""
    vocabulary = {chr(33 + i): i for i in range(94)} | {"aa": 94, "bb": 95, "cc": 96}
    inner = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("b", "b"), ("c", "c")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


class Collect(BaseStreamer):
    def __init__(self):
        self.columns, self.ended = [], False

    def put(self, value):
        self.columns.append(value.reshape(len(value), -1) if value.dim() == 1 else value)

    def end(self):
        self.ended = True


class Steps:
    def __init__(self):
        self.texts, self.drafts, self.ends = {}, 0, 0

    def put_step(self, row, tokens, accepted, ended):
        self.texts.setdefault(row, []).extend(tokens)
        self.drafts += accepted

    def end(self):
        self.ends += 1
