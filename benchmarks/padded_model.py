"""Pad a small model to the cost of a large one, with unchanged output, and measure it as `redrafter bench` does.

python benchmarks/padded_model.py --pad-to llama-3.1-8b --model base-25m --drafter drafter-25m --device cuda ...
python benchmarks/padded_model.py --pad-to smollm2-8b --model smollm2 --drafter drafter --save big --w4a16

A trained pair generates real text but is too small to measure a GPU; an untrained large model has the cost but
generates noise that no drafter predicts. Padding combines both. The residual stream gets dims that stay zero, attention
gets heads and the MLP gets neurons that nothing reads, the stack gets layers that add zero, and the head gets rows
whose logits are masked. Every kernel runs at the large shape, and the logits equal the small model's, up to rounding.

The mean square of a vector that zeros were added to is d/D of what it was, D of d dims. So a norm's weights are scaled
by the root of d/D and its epsilon by d/D, and so are the drafter's weights that read the outputs of layers, which it
brings to a root mean square of 1.

Added weights are random, so that nothing is timed on zeros, except where a zero is what makes it exact: the added
columns of the embedding, and all of `o_proj` and `down_proj` (and of the drafter's head) but the real block; and the
added outputs of the drafter's recurrence and fused hidden state, where an attention to the text normalises them.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2ForCausalLM

from packed_checkpoint import save_checkpoint
from padded_drafters import pad_drafter, pad_eagle
from padding import PadShape, by_head, check_fits, corner, random_on
from redrafter.app.flags import read_options
from redrafter.app.loading import NO_DRAFT_OPTIONS, Pair, check_options
from redrafter.app.options import LoadOptions
from redrafter.app.program import run_command, silence_libraries
from redrafter.checkpoints.quantization import quantize_model
from redrafter.cli.measure import bench_pair
from redrafter.cli.measure_options import BenchOptions, build_parser
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.eagle import EagleDrafter
from redrafter.engine.redrafter import ReDrafter
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.model.quantized_layers import quantize_linears
from redrafter.model.target import Target

SHAPES = {
    "llama-3.1-8b": PadShape(4096, 14336, 32, 32, 8, 128, 128256),
    "llama-3.2-1b": PadShape(2048, 8192, 16, 32, 8, 64, 128256),
    "qwen2.5-7b": PadShape(3584, 18944, 28, 28, 4, 128, 152064),
    "qwen2.5-coder-7b": PadShape(3584, 18944, 28, 28, 4, 128, 151936),  # with the ids of its smaller ones, to be saved
    "smollm2-8b": PadShape(4096, 14336, 32, 64, 16, 64, 49152),  # an 8B's cost with SmolLM2's heads and vocabulary
}


def describe(shape_name: str, base_name: str) -> str:
    """Return the note that is printed with every table of a padded model."""
    return (
        f"This is {base_name}'s text at {shape_name}'s cost: {base_name} zero-padded to that shape, "
        f"not a {shape_name} model."
    )


class PaddedHead(nn.Linear):
    """A head `[V, D]` that computes all logits and then masks the added ids, so that none is ever sampled."""

    def __init__(self, hidden_size: int, vocab_size: int, real: int):
        super().__init__(hidden_size, vocab_size, bias=False)
        self.real = real  # ids of the small model; logits from this one on are -inf

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of hidden states `[..., D]`."""
        logits = super().forward(hidden)  # [..., V]
        logits[..., self.real :].fill_(float("-inf"))
        return logits


@contextmanager
def unmasked(model: PreTrainedModel) -> Iterator[None]:
    """Disable a padded model's mask while a `Target` binds it.

    The target's self-test subtracts logits, and the difference of two that are -inf is not a number.
    """
    head = model.get_output_embeddings()
    assert isinstance(head, PaddedHead)
    real, head.real = head.real, head.out_features
    try:
        yield
    finally:
        head.real = real


@torch.no_grad()
def pad_model(
    model: LlamaForCausalLM | Qwen2ForCausalLM, shape: PadShape, *, device: str | torch.device, seed: int = 0
) -> PreTrainedModel:
    """Pad a Llama or Qwen2: its logits are equal for the model's own ids, and -inf for the added ones.

    The result has the model's dtype and is for inference only: a checkpoint would not restore a masked head.

    Raises:
        ArgumentError: The model is of another type, or does not fit into the shape.
    """
    sizes = _sizes_of(model.config)
    check_fits(sizes, shape)
    config = copy.deepcopy(model.config)
    for name, value in asdict(shape).items():
        setattr(config, name, value)
    if config.model_type == "qwen2":
        config.layer_types = ["full_attention"] * shape.num_hidden_layers
    small, large = model.config.hidden_size, shape.hidden_size
    # Padding scales the mean square by small / large, so scale epsilon alike.
    config.rms_norm_eps = model.config.rms_norm_eps * small / large
    # The padded head masks added ids, so it cannot be the embedding.
    config.tie_word_embeddings = False
    with torch.device("meta"):  # costs nothing; `_random_on` allocates
        kind: Any = type(model)
        padded = kind(config)
        padded.lm_head = PaddedHead(large, shape.vocab_size, model.config.vocab_size)
    padded = random_on(padded, device, model.dtype, seed)
    padded.model.rotary_emb = copy.deepcopy(model.model.rotary_emb).to(device)  # its buffers are not weights
    padded.generation_config = copy.deepcopy(model.generation_config)

    # Keeps the added dims of the residual stream at zero at the input; the layers keep them there.
    padded.model.embed_tokens.weight[:, small:] = 0
    corner(padded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    corner(padded.lm_head.weight, model.lm_head.weight)
    _scale_norm(padded.model.norm.weight, model.model.norm.weight)
    for layer in padded.model.layers:
        # Zero outputs: an added layer, head or neuron contributes nothing to the residual stream.
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for big, layer in zip(padded.model.layers, model.model.layers, strict=False):  # further layers add nothing
        ours = dict(big.named_parameters())
        for name, weight in layer.named_parameters():
            if name.startswith("self_attn"):
                corner(by_head(ours[name], name, shape), by_head(weight, name, sizes))
            elif name.startswith("mlp"):
                corner(ours[name], weight)
            else:
                _scale_norm(ours[name], weight)
    return padded


def _sizes_of(config: PreTrainedConfig) -> PadShape:
    """Return the sizes of a plain Llama or Qwen2; raise `ArgumentError` for another model."""
    if config.model_type not in ("llama", "qwen2"):
        raise ArgumentError(f"only a model of type 'llama' or 'qwen2' can be padded, got {config.model_type!r}")
    if bias := next((name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)), None):
        raise ArgumentError(f"only a Llama without biases can be padded, but this one has {bias}=True")
    if getattr(config, "use_sliding_window", False):
        raise ArgumentError("only a Qwen2 whose layers attend to everything can be padded: it has use_sliding_window")
    values: dict[str, Any] = {each.name: getattr(config, each.name, None) for each in fields(PadShape)}
    # A Llama's config may name None, for one key-value head each; a Qwen2's has no `head_dim`.
    values["num_key_value_heads"] = values["num_key_value_heads"] or config.num_attention_heads
    values["head_dim"] = values["head_dim"] or config.hidden_size // config.num_attention_heads
    return PadShape(**values)


def _scale_norm(big: Tensor, small: Tensor) -> None:
    """Write a norm's weights times the root of d/D: added zeros scale the mean square of its input by d/D."""
    corner(big, small * (len(small) / len(big)) ** 0.5)


def bench_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of `redrafter bench` with the flags of padding, for a script of this name."""
    parser = build_parser("bench")
    parser.prog = name
    parser.add_argument("--pad-to", choices=SHAPES, help="pad a small Llama or Qwen2 to the cost of a large one")
    parser.add_argument("--pad-head-rank", type=int, metavar="N", help="rank of the drafter's padded head")
    return parser


def load_pair(args: argparse.Namespace) -> tuple[Pair, str | None]:
    """Load the pair that flags of `bench_parser` name, padded if they say so; and a note that says what it is."""
    _, load, _ = check_options(read_options(LoadOptions, args), NO_DRAFT_OPTIONS)
    if args.pad_to is None:
        return Pair.load(load), None
    # The small pair is only copied into the padded one, which is quantized afterwards.
    pair = Pair.load(replace(load, device="cpu", quantization=None, draft_quantization=None))
    padded, drafter = pad_pair(pair, args.pad_to, args.pad_head_rank, str(load.device))
    if load.quantization is not None:
        quantize_model(padded, args.pad_to, load.quantization)
    if load.draft_quantization is not None:
        quantize_linears(drafter, load.draft_quantization, keep=(drafter.unquantized,))
    with unmasked(padded):
        target = Target(padded)
    assert isinstance(pair.engine, ReDrafter)
    pair.engine = ReDrafter(target, drafter, pair.engine.shape, options=pair.engine.options)
    return pair, describe(args.pad_to, Path(pair.name).name)


def pad_pair(pair: Pair, shape_name: str, head_rank: int | None, device: str) -> tuple[Any, Any]:
    """Pad the base and the drafter of a loaded pair."""
    shape, small = SHAPES[shape_name], pair.engine
    assert isinstance(small, ReDrafter)
    model: Any = small.model
    drafter: Any = small.drafter
    if isinstance(drafter, EagleDrafter) and head_rank is None:
        drafter = pad_eagle(drafter, model.config.num_hidden_layers, shape, device=device)
    elif isinstance(drafter, RecurrentDrafter):
        drafter = pad_drafter(drafter, shape.hidden_size, shape.vocab_size, head_rank=head_rank, device=device)
    else:
        raise UnsupportedError("--pad-to pads recurrent drafters, and EAGLE-3 heads without --pad-head-rank, alone")
    return pad_model(model, shape, device=device), drafter


def save_pair(args: argparse.Namespace) -> int:
    """Save the padded pair that flags name as the directories `base` and `drafter`. Returns the exit code."""
    _, load, _ = check_options(read_options(LoadOptions, args), NO_DRAFT_OPTIONS)
    folder = Path(args.save)
    if args.pad_to is None or load.quantization or load.draft_quantization:
        raise ArgumentError("--save needs --pad-to, and neither --quantization nor --draft-quantization")
    if folder.exists():
        raise ArgumentError(f"--save {folder}: it exists")
    pair = Pair.load(replace(load, device="cpu"))
    ids, shape_ids = pair.engine.target.vocab_size, SHAPES[args.pad_to].vocab_size
    if ids != shape_ids:
        raise ArgumentError(
            f"{args.pad_to} adds ids, which a checkpoint cannot mask: it has {shape_ids}, the base {ids}"
        )
    padded, drafter = pad_pair(pair, args.pad_to, args.pad_head_rank, str(load.device))
    save_checkpoint(padded, folder / "base", w4a16=args.w4a16)
    pair.tokenizer.save_pretrained(folder / "base")
    drafter.config.base_model = str(folder / "base")
    drafter.save_pretrained(folder / "drafter")
    print(f"saved {folder / 'base'} and {folder / 'drafter'}. {describe(args.pad_to, Path(pair.name).name)}")
    return 0


def main() -> int:
    """Measure or save a padded pair. Returns the exit code."""
    parser = bench_parser("benchmarks/padded_model.py")
    parser.add_argument("--save", metavar="DIR", help="save the pair as DIR/base and DIR/drafter, and measure nothing")
    parser.add_argument("--w4a16", action="store_true", help="save the base with weights of 4 bits in groups of 32")
    args = parser.parse_args()

    def command() -> int:
        silence_libraries()
        if args.save is not None:
            return save_pair(args)
        if args.w4a16:
            raise ArgumentError("--w4a16 needs --save; --quantization int4 measures weights of 4 bits")
        pair, note = load_pair(args)
        return bench_pair(pair, read_options(LoadOptions, args), read_options(BenchOptions, args), note)

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
