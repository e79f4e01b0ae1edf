"""Checkpoints with MTP layers under their published names, and what such a layer says by a plain recomputation."""

import copy
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from helpers.models import tiny_model
from helpers.recurrent import recurrent_model
from helpers.searches import checked_searches
from redrafter.checkpoints.mtp import load_mtp
from redrafter.drafting.mtp import MTPDrafter, MTPProposer
from redrafter.drafting.mtp_attention import Past
from redrafter.model.target import Target


@dataclass(frozen=True)
class Form:
    """A family's names, and a tiny model of it.

    Attributes:
        model: Makes the model.
        names: Names of the norms of embedding, hidden state and output, and of the product; N is the number of layers.
        blocks: What the names of the tensors of each decoder layer begin with, and what the model's layer has that is
            like it.
        hidden_first: Whether the product reads the hidden state before the embedding.
        first_is_zero: Whether the entry at position 0 has zeros in place of an embedding.
        published: Parts of names of transformers, and what the published ones have for each.
    """

    model: Callable[[], PreTrainedModel]
    names: tuple[str, str, str | None, str]
    blocks: tuple[tuple[str, str], ...]
    hidden_first: bool = False
    first_is_zero: bool = False
    published: tuple[tuple[str, str], ...] = ()

    def likes(self, model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
        """Return what the names of each decoder layer begin with, and the model's layer that is like it."""
        layers, count = list(model.get_decoder().layers), model.config.num_hidden_layers
        has = lambda layer, part: any(name.startswith(part) for name in layer.state_dict())  # noqa: E731
        return [
            (begins.replace("N", str(count)), next(layer for layer in layers[::-1] if has(layer, part)))
            for begins, part in self.blocks
        ]

    def published_name(self, name: str) -> str:
        """Return the published name of a tensor of a decoder layer."""
        for ours, theirs in self.published:
            name = name.replace(ours, theirs)
        return name


def _begun(place: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for name in names)


def _decoder(begins: str) -> tuple[tuple[str, str], ...]:
    return ((begins, "self_attn.o_proj"),)


QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
DEEPSEEK = _begun("model.layers.N", "enorm", "hnorm", "shared_head.norm", "eh_proj")
MIMO = _begun("model.mtp_layers.0", "token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")


def _hybrid(model_type: str) -> Callable[[], PreTrainedModel]:
    return lambda: copy.deepcopy(recurrent_model(model_type))


FORMS: dict[str, Form] = {
    "deepseek_v3": Form(lambda: tiny_model("deepseek_v3"), DEEPSEEK, _decoder("model.layers.N.")),
    "glm4_moe": Form(
        lambda: tiny_model(
            "glm4_moe",
            **{"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        ),
        DEEPSEEK,
        _decoder("model.layers.N."),
    ),
    "mimo": Form(
        lambda: tiny_model("qwen2"), MIMO, _decoder("model.mtp_layers.0."), hidden_first=True, first_is_zero=True
    ),
    "qwen3_next": Form(_hybrid("qwen3_next"), QWEN, _decoder("mtp.layers.0.")),
    "qwen3_5_text": Form(_hybrid("qwen3_5_text"), QWEN, _decoder("mtp.layers.0.")),
    "qwen3_5_moe_text": Form(_hybrid("qwen3_5_moe_text"), QWEN, _decoder("mtp.layers.0.")),
    "nemotron_h": Form(
        _hybrid("nemotron_h"),
        (*_begun("mtp.layers", "0.enorm", "0.hnorm", "1.final_layernorm"), "mtp.layers.0.eh_proj"),
        (("mtp.layers.0.", "mixer.q_proj"), ("mtp.layers.1.", "mixer.experts")),
    ),
    "bailing_hybrid": Form(
        _hybrid("bailing_hybrid"),
        _begun("model.layers.N", "enorm", "hnorm", "final_layernorm", "eh_proj"),
        (("model.layers.N.", "self_attn.kv_b_proj"),),
        first_is_zero=True,
        published=(
            ("self_attn.o_proj", "self_attn.dense"),
            ("self_attn.", "attention."),
            ("gate.e_score_correction_bias", "gate.expert_bias"),
        ),
    ),
    "ernie4_5_moe": Form(
        lambda: tiny_model(
            "ernie4_5_moe",
            **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
        ),
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", None, "model.mtp_linear_proj.0"),
        (("model.mtp_block.0.", "mlp.up_proj"),),
        first_is_zero=True,
    ),
}


def mtp_tensors(model: PreTrainedModel, form: Form) -> dict[str, Tensor]:
    """Return random tensors of an MTP layer of a model under the published names, those of experts apart."""
    generator, count = torch.Generator().manual_seed(17), model.config.num_hidden_layers
    width = model.config.hidden_size

    def random(shape: tuple[int, ...], spread: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    *norms, product = (name and name.replace("N", str(count)) for name in form.names)
    tensors = {f"{name}.weight": 0.75 + random((width,), 0.1) for name in norms if name}
    tensors[f"{product}.weight"] = random((width, 2 * width))
    for begins, like in form.likes(model):
        for name, x in like.state_dict().items():
            made = random(tuple(x.shape)) if x.dim() > 1 else 0.75 + random(tuple(x.shape), 0.1)
            parts = _experts(name, made) or {name: made}
            tensors |= {begins + form.published_name(part): x for part, x in parts.items()}
    return tensors


def _experts(name: str, joined: Tensor) -> dict[str, Tensor]:
    """Return the tensors of each expert, by their published names, of what transformers joins; none of another."""
    place, _, last = name.rpartition(".")
    if not place.endswith("experts"):
        return {}
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return {
        f"{place}.{expert}.{part}.weight": half.clone()
        for expert, rows in enumerate(joined)
        for part, half in zip(parts, rows.chunk(len(parts)), strict=True)
    }


def mtp_checkpoint(place: Path, name: str, *, sharded: bool = False, **changes: Tensor | None) -> Path:
    """Write a tiny model of a form with an MTP layer, with changes to its tensors; None leaves one out."""
    model, form = FORMS[name].model(), FORMS[name]
    model.generation_config.eos_token_id = None
    model.save_pretrained(place)
    tensors = mtp_tensors(model, form) | changes
    written = {name: x for name, x in tensors.items() if x is not None}
    weights = load_file(place / "model.safetensors")
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


def add_mtp(model: PreTrainedModel, place: Path, form: Form | None = None) -> None:
    """Write a random MTP layer for a model of any type into a directory, beside the model's own weights if any."""
    file = place / "model.safetensors"
    tensors = mtp_tensors(model, form or Form(lambda: model, QWEN, _decoder("mtp.layers.0.")))
    save_file((load_file(file) if file.exists() else {}) | tensors, file, metadata={"format": "pt"})


def random_mtp(target: Target, form: Form | None = None) -> MTPDrafter:
    """Make an MTP layer for a target, with random weights, of its family's form or one that fits most models."""
    place = Path(mkdtemp())
    add_mtp(target.model, place, form)
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
    decoder, norms = model.get_decoder(), []
    blocks = []
    for begins, like in form.likes(model):
        blocks.append(copy.deepcopy(like))
        for part in blocks[-1].modules():
            if hasattr(part, "config"):
                part.config = copy.deepcopy(part.config)
                part.config._attn_implementation = "eager"
        state = {}
        for name, x in like.state_dict().items():
            parts = [tensors[begins + form.published_name(part)] for part in _experts(name, x) or (name,)]
            if parts[0].shape != x.shape:
                parts = [torch.cat(parts).view(x.shape)]
            state[name] = parts[0]
        blocks[-1].load_state_dict(state)
    for name in form.names[:3]:
        norm: nn.Module = copy.deepcopy(getattr(decoder, "norm", None) or decoder.norm_f)
        norms.append(nn.Identity())
        if name:
            norm.load_state_dict({"weight": tensors[name.replace("N", str(count)) + ".weight"]})
            norms[-1] = norm
    product = tensors[form.names[3].replace("N", str(count)) + ".weight"]

    hidden = model(input_ids=text[None, :-1], output_hidden_states=True).hidden_states[-1][0]
    following, logits, rope = torch.cat([text[1:], drafts]), [], {}
    for _ in range(len(drafts) + 1):
        embedded = model.get_input_embeddings()(following[: len(hidden)])
        if form.first_is_zero:
            embedded = torch.cat([torch.zeros(1, width), embedded[1:]])
        parts = [norms[0](embedded), norms[1](hidden)]
        inputs = linear(torch.cat(parts[::-1] if form.hidden_first else parts, dim=-1), product)[None]
        positions = torch.arange(len(hidden))[None]
        mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        if hasattr(decoder, "rotary_emb"):
            sections = 3 if hasattr(decoder.rotary_emb, "mrope_section") else 1
            rope = {"position_embeddings": decoder.rotary_emb(inputs, positions.expand(sections, -1, -1).squeeze(0))}
        for block in blocks:
            output = block(inputs, attention_mask=mask, position_ids=positions, **rope)
            inputs = output[0] if isinstance(output, tuple) else output
        normed = norms[2](inputs).view(len(hidden), width)[-1:]
        logits.append(model.get_output_embeddings()(normed))
        hidden = torch.cat([hidden, normed])
    return torch.cat(logits)


def checked_layers(tensors: dict[str, Tensor] | None = None, form: Form | None = None) -> AbstractContextManager[None]:
    """Compare the logits of searches with a plain recomputation.

    The layer is one of `tensors` under the names of `form`; None for one of `random_mtp`.
    """

    def check(proposer: MTPProposer, row: int, text: Tensor, beams: list[int], drafts: Tensor, kept: list) -> None:
        model = proposer.target.model
        named = form or Form(lambda: model, QWEN, _decoder("mtp.layers.0."))
        expected = plain_logits(model, tensors or mtp_tensors(model, named), named, text, drafts)
        for level, beam in enumerate(beams):
            found = model.get_output_embeddings()(kept[level][row, beam])
            # Recurrent states of a base are summed in another order than in a whole text: 1e-3 of a hidden state.
            torch.testing.assert_close(found, expected[level], atol=2e-2, rtol=1e-3)

    def keep(kept: list[Tensor], result: Tensor, _: Tensor, position: Tensor, past: Past) -> None:
        kept.append(result[0].unflatten(0, (len(past.rows.starts) - 1, -1)))  # [B, w, D]

    return checked_searches(MTPProposer, MTPDrafter, "step", check, keep)
