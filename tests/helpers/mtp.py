"""Checkpoints with MTP layers under their published names, and what such a layer says by a plain recomputation."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from helpers.eagle import best_path
from helpers.models import tiny_model
from helpers.recurrent import recurrent_model
from redrafter.checkpoints.mtp import load_mtp
from redrafter.drafting.mtp import MTPDrafter, MTPProposer
from redrafter.drafting.proposer import State
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree


@dataclass(frozen=True)
class Form:
    """A family's names, and a tiny model of it.

    Attributes:
        model: Makes the model.
        names: Names of the norms of embedding, hidden state and output, and of the product; N is the number of layers.
        block: What the names of the decoder layer's tensors begin with.
        hidden_first: Whether the product reads the hidden state before the embedding.
        first_is_zero: Whether the entry at position 0 has zeros in place of an embedding.
        layer: The model's layer that the MTP layer is like.
    """

    model: Callable[[], PreTrainedModel]
    names: tuple[str, str, str, str]
    block: str
    hidden_first: bool = False
    first_is_zero: bool = False
    layer: int = -1


def _begun(place: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for name in names)


QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
DEEPSEEK = _begun("model.layers.N", "enorm", "hnorm", "shared_head.norm", "eh_proj")
MIMO = _begun("model.mtp_layers.0", "token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")


def _hybrid(model_type: str) -> Callable[[], PreTrainedModel]:
    return lambda: copy.deepcopy(recurrent_model(model_type))


FORMS: dict[str, Form] = {
    "deepseek_v3": Form(lambda: tiny_model("deepseek_v3"), DEEPSEEK, "model.layers.N."),
    "glm4_moe": Form(
        lambda: tiny_model(
            "glm4_moe",
            **{"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        ),
        DEEPSEEK,
        "model.layers.N.",
    ),
    "mimo": Form(lambda: tiny_model("qwen2"), MIMO, "model.mtp_layers.0.", hidden_first=True, first_is_zero=True),
    "qwen3_next": Form(_hybrid("qwen3_next"), QWEN, "mtp.layers.0."),
    "qwen3_5_text": Form(_hybrid("qwen3_5_text"), QWEN, "mtp.layers.0."),
    "qwen3_5_moe_text": Form(_hybrid("qwen3_5_moe_text"), QWEN, "mtp.layers.0."),
}


def mtp_tensors(model: PreTrainedModel, form: Form) -> dict[str, Tensor]:
    """Return random tensors of an MTP layer of a model under the published names, those of experts apart."""
    generator, count = torch.Generator().manual_seed(17), model.config.num_hidden_layers
    width = model.config.hidden_size

    def random(shape: tuple[int, ...], spread: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    *norms, product = (name.replace("N", str(count)) for name in form.names)
    tensors = {f"{name}.weight": 0.75 + random((width,), 0.1) for name in norms}
    tensors[f"{product}.weight"] = random((width, 2 * width))
    begins = form.block.replace("N", str(count))
    layers = model.get_decoder().layers
    like = next(layers[i] for i in reversed(range(count)) if hasattr(layers[i], "self_attn"))
    for name, x in like.state_dict().items():
        made = random(tuple(x.shape)) if x.dim() > 1 else 0.75 + random(tuple(x.shape), 0.1)
        place, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, rows in enumerate(made):
                for part, half in zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True):
                    tensors[f"{begins}{place}.{expert}.{part}.weight"] = half.clone()
        elif last == "down_proj":
            tensors |= {f"{begins}{place}.{expert}.{last}.weight": rows.clone() for expert, rows in enumerate(made)}
        else:
            tensors[begins + name] = made
    return tensors


def mtp_checkpoint(place: Path, name: str, *, sharded: bool = False, **changes: Tensor | None) -> Path:
    """Write a tiny model of a form with an MTP layer, with changes to its tensors; None leaves one out."""
    model, form = FORMS[name].model(), FORMS[name]
    model.generation_config.eos_token_id = None
    model.save_pretrained(place)
    tensors = mtp_tensors(model, form) | changes
    written = {name: x for name, x in tensors.items() if x is not None}
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if not sharded:
        save_file(weights | written, place / "model.safetensors", metadata={"format": "pt"})
        return place
    (place / "model.safetensors").unlink()
    parts = {"model-1.safetensors": weights, "model-2.safetensors": written}
    for file, part in parts.items():
        save_file(part, place / file, metadata={"format": "pt"})
    index = {name: file for file, part in parts.items() for name in part}
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return place


def random_mtp(target: Target) -> MTPDrafter:
    """Make an MTP layer for a target, with random weights."""
    place = Path(mkdtemp())
    save_file(mtp_tensors(target.model, Form(lambda: target.model, QWEN, "mtp.layers.0.")), place / "model.safetensors")
    drafter = load_mtp(str(place), target)
    assert drafter is not None
    return drafter


@torch.no_grad()
def plain_logits(
    model: PreTrainedModel, tensors: dict[str, Tensor], form: Form, text: Tensor, drafts: Tensor
) -> Tensor:
    """Return what an MTP layer says after a text `[T]` and after each of K drafts, `[K + 1, V]`, without any cache.

    Each time the whole chain is computed anew, under a causal mask: entry t reads the model's last hidden state at
    token t and the embedding of token t + 1; an entry after these, the output of the one before it.
    """
    count, width = model.config.num_hidden_layers, model.config.hidden_size
    layers, decoder = model.get_decoder().layers, model.get_decoder()
    index = next(i for i in reversed(range(count)) if hasattr(layers[i], "self_attn"))
    block, norms = copy.deepcopy(layers[index]), []
    block.self_attn.config = copy.deepcopy(block.self_attn.config)
    block.self_attn.config._attn_implementation = "eager"
    begins = form.block.replace("N", str(count))
    stored = {name.removeprefix(begins): x for name, x in tensors.items() if name.startswith(begins)}
    state = {}
    for name, x in block.state_dict().items():
        place, _, last = name.rpartition(".")
        experts = range(len(x))
        if last == "gate_up_proj":
            parts = [[stored[f"{place}.{e}.{part}.weight"] for part in ("gate_proj", "up_proj")] for e in experts]
            state[name] = torch.stack([torch.cat(pair) for pair in parts])
        elif last == "down_proj":
            state[name] = torch.stack([stored[f"{place}.{e}.down_proj.weight"] for e in experts])
        else:
            state[name] = stored[name]
    block.load_state_dict(state)
    for name in form.names[:3]:
        norm: nn.Module = copy.deepcopy(decoder.norm)
        norm.load_state_dict({"weight": tensors[name.replace("N", str(count)) + ".weight"]})
        norms.append(norm)
    product = tensors[form.names[3].replace("N", str(count)) + ".weight"]

    hidden = model(input_ids=text[None, :-1], output_hidden_states=True).hidden_states[-1][0]
    following, logits = torch.cat([text[1:], drafts]), []
    for _ in range(len(drafts) + 1):
        embedded = model.get_input_embeddings()(following[: len(hidden)])
        if form.first_is_zero:
            embedded = torch.cat([torch.zeros(1, width), embedded[1:]])
        parts = [norms[0](embedded), norms[1](hidden)]
        inputs = linear(torch.cat(parts[::-1] if form.hidden_first else parts, dim=-1), product)[None]
        positions = torch.arange(len(hidden))[None]
        mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        rope = decoder.rotary_emb(inputs, positions)
        output = block(inputs, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        normed = norms[2](output[0] if isinstance(output, tuple) else output).view(len(hidden), width)[-1:]
        logits.append(model.get_output_embeddings()(normed))
        hidden = torch.cat([hidden, normed])
    return torch.cat(logits)


@contextmanager
def checked_layers(tensors: dict[str, Tensor] | None = None, form: Form | None = None) -> Iterator[None]:
    """Compare the logits of every search with a plain recomputation, of long texts too.

    The layer is one of `tensors` under the names of `form`; None for one of `random_mtp`.
    """
    propose, step, checked, outputs = MTPProposer.propose, MTPDrafter.step, [], []

    def step_kept(self: MTPDrafter, *arguments: object) -> Tensor:
        outputs.append(step(self, *arguments))
        return outputs[-1]

    def propose_checked(
        self: MTPProposer, state: State, sampler: Sampler, noise: Tensor | None, *caches: object
    ) -> Tree:
        outputs.clear()
        tree = propose(self, state, sampler, noise, *caches)
        model = self.target.model
        named = form or Form(lambda: model, QWEN, "mtp.layers.0.")
        weights = tensors or mtp_tensors(model, named)
        for row in state.active.nonzero().flatten().tolist():
            text = state.tokens[row, : state.length[row] + 1]
            path = best_path(tree, row)
            expected = plain_logits(model, weights, named, text, tree.tokens[row, path[1:]])
            for level, node in enumerate(path[: len(outputs)]):
                beam = 0 if level == 0 else node - 1 - (level - 1) * self.beams
                found = model.get_output_embeddings()(outputs[level][row, beam])
                torch.testing.assert_close(found, expected[level], atol=1e-3, rtol=1e-3)
            checked.append(len(text))
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPProposer, "propose", propose_checked)
        patch.setattr(MTPDrafter, "step", step_kept)
        yield
    assert max(checked, default=0) > 24, "no long text was checked"
