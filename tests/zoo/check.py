"""One tiny model, decoded with drafts on both caches, beside what transformers writes with it."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from helpers.models import Scripted, paged, row_texts, tiny_drafter
from redrafter import Engine, ReDrafter, ReDrafterError
from redrafter.model.target import Target
from redrafter.tree.sizes import TreeShape

from .configs import VOCAB, tiny_config
from .variants import Variant

__all__ = ["CRASHED", "DIFFERENT", "EQUAL", "REFUSED", "UNMADE", "Outcome", "check"]

EQUAL, UNMADE, REFUSED, DIFFERENT, CRASHED = "equal", "not made", "refused", "DIFFERENT", "CRASHED"
NEW = 24  # tokens written
TOLERANCE = 5e-3  # of logits; their spread is 1
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "seed": [5, 6, 7, 8]}


@dataclass(frozen=True)
class Outcome:
    """How a model did.

    status: One of the five words above.
    detail: Why, unless it is equal.
    unpaged: Why it is decoded on the dense cache only; None when it is equal on the paged one too, or never got there.
    """

    status: str
    detail: str = ""
    unpaged: str | None = None

    @property
    def failed(self) -> bool:
        return self.status in (DIFFERENT, CRASHED)


def check(model_type: str, variant: Variant) -> Outcome:
    """Bind a tiny model of that type, and compare drafted texts with plain ones, greedy and sampled."""
    outcome = _check(model_type, variant)
    if variant.served and outcome.status == REFUSED:
        return Outcome(DIFFERENT, f"refused, though it is to be served: {outcome.detail}")
    return outcome


def _check(model_type: str, variant: Variant) -> Outcome:
    try:
        model = random_model(model_type, variant)
    except Exception as error:
        return Outcome(UNMADE, _told(error))
    try:
        target = Target(model)
    except ReDrafterError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(CRASHED, f"when bound: {_told(error)}")
    ids, mask = uneven_prompts(variant.lengths)
    try:
        expected, logits = map(
            torch.cat, zip(*(_alone(model, ids, mask, row, variant.cached) for row in range(len(ids))), strict=True)
        )
    except Exception as error:
        return Outcome(UNMADE, f"by model.generate: {_told(error)}")
    for cache in ("dense", "paged"):
        try:
            if cache == "paged" and not target.paged.ok:
                return Outcome(EQUAL, unpaged=target.paged.reason)
            for what in _differences(target, ids, mask, expected, logits, cache):
                return Outcome(DIFFERENT, f"{cache}, {what}")
        except ReDrafterError as error:
            return Outcome(REFUSED, f"{error}")
        except Exception as error:
            return Outcome(CRASHED, f"{cache}: {_told(error)}")
    return Outcome(EQUAL)


def random_model(model_type: str, variant: Variant) -> PreTrainedModel:
    """Make a random model. What is 0 or 1 by default is made to count: norms, gates, biases, sinks."""
    torch.manual_seed(0)
    config = tiny_config(model_type, variant.window, **variant.fields)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.05)  # else a tied head repeats what it reads
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end of text
    return model


def uneven_prompts(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return left-padded ids `[B, P]` and their mask."""
    longest = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), longest), generator=torch.Generator().manual_seed(longest))
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()
    return ids * mask, mask


def _alone(model: PreTrainedModel, ids: Tensor, mask: Tensor, row: int, cached: bool) -> tuple[Tensor, Tensor]:
    """Decode one row alone with `model.generate`; return the text, padding put back, and its logits `[1, NEW, V]`."""
    own = ids[row, mask[row].bool()][None]
    told = GREEDY | {"use_cache": cached, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(own, attention_mask=torch.ones_like(own), **told)
    padding = ids[row : row + 1, : ids.shape[1] - own.shape[1]]
    return torch.cat([padding, out.sequences], dim=1), torch.stack(out.logits, dim=1)


def _differences(
    target: Target, ids: Tensor, mask: Tensor, expected: Tensor, logits: Tensor, cache: str
) -> Iterator[str]:
    """Yield a line for each way of decoding that does not write the expected ids `[B, P + NEW]`, by these logits."""
    ready = paged if cache == "paged" else lambda engine: engine
    drafter = tiny_drafter(hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    engine = ready(ReDrafter(target, drafter, TreeShape(4, 3, 999)))
    out = engine.generate(ids, mask, speculate=False, **GREEDY)
    if not torch.equal(out, expected):
        yield f"greedy, no drafts: {_where(out, expected, ids)}"
    drawn = engine.generate(ids, mask, speculate=False, **SAMPLED)
    for how, arguments, wanted in (("greedy", GREEDY, expected), ("sampled", SAMPLED, drawn)):
        out = engine.generate(ids, mask, **arguments)
        if not torch.equal(out, wanted):
            yield f"{how}, random drafts: {_where(out, wanted, ids)}"
        script = row_texts(wanted, mask)
        script[:, ::5] = (script[:, ::5] + 1) % VOCAB
        scripted = ready(Engine(target, Scripted(script, 3, 3)))
        told = scripted.generate(ids, mask, return_dict_in_generate=True, output_logits=True, **arguments)
        if not torch.equal(told.sequences, wanted):
            yield f"{how}, drafts that are mostly right: {_where(told.sequences, wanted, ids)}"
        elif not told.stats.accepted:
            yield f"{how}: no draft that is right was accepted"
        elif how == "greedy" and (error := _error(torch.stack(told.logits, dim=1), logits)) > TOLERANCE:
            yield f"the text is the same, its logits are not (relative error {error:.2g})"


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error of logits `[B, NEW, V]` relative to the spread of a token's."""
    return float(((found - expected).abs().amax(dim=-1) / expected.std(dim=-1)).max())


def _where(found: Tensor, wanted: Tensor, ids: Tensor) -> str:
    """Say at which new token each row differs first."""
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)} for {tuple(wanted.shape)}"
    other = found != wanted
    rows = other.any(dim=1).nonzero().flatten().tolist()
    return "first other token of " + ", ".join(
        f"row {row} is new token {int(other[row].nonzero()[0]) - ids.shape[1]}" for row in rows
    )


def _told(error: BaseException) -> str:
    """Describe an error that is not ours in a line, with where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({last.filename.rpartition('/')[2]}:{last.lineno})"
