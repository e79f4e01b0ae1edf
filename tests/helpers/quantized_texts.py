"""Count the texts that drafts leave unchanged, in float32, for every format of quantised bases.

PYTHONPATH=tests python -m helpers.quantized_texts --model base-25m --drafter drafter-25m --prompts prompts.jsonl

A checkpoint of each format is made of an ordinary model and loaded as users load it. Each line compares texts with
undrafted decoding: those of transformers' `generate`, of a drafter and of recycled tokens, greedily and with seeds at
temperature 1. torchao's int8 and bitsandbytes' NF4 need their packages.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from helpers.gguf_files import HALVES, write_gguf
from helpers.packed import AWQ, GPTQ, TORCHAO, as_awq, as_compressed, as_gptq, as_torchao, save_packed
from redrafter import ReDrafter
from redrafter.measure.record import find_differences
from redrafter.model.quantized_layers import quantized_form

Source = tuple[Any, dict[str, Any]]  # a base and further arguments of `from_pretrained`
SECOND = {"checkpoint_format": "gptq_v2"}


def compressed(bits: int) -> dict[str, Any]:
    """Return the settings of compressed-tensors for weights of some bits in groups of 32."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights}
    entries = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return entries | {"ignore": ["lm_head"], "quantization_status": "compressed", "bits": bits}


def packed(folder: Path, base: Path, **how: Any) -> Source:
    """Write a checkpoint that a package for quantisation has packed."""
    return save_packed(folder, ordinary(base), **how), {}


def gguf_file(folder: Path, base: Path, *, kind: GGMLQuantizationType) -> Source:
    """Write a GGUF file in one format."""
    return write_gguf(folder / "a.gguf", ordinary(base), AutoTokenizer.from_pretrained(base), matrices=kind), {
        "quantization": "gguf"
    }


def torchao_int8(folder: Path, base: Path) -> Source:
    """Let torchao write a checkpoint."""
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16", quantization_config=config).save_pretrained(folder)
    return folder, {}


def dequantized_nf4(folder: Path, base: Path) -> Source:
    """Return a model with the numbers of bitsandbytes' NF4."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="float32", quantization_config=config)
    return model.dequantize().float(), {}


def ordinary(base: Path) -> PreTrainedModel:
    """Load a base in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    return model


FORMATS: Mapping[str, Callable[[Path, Path], Source]] = {
    **{kind.name: partial(gguf_file, kind=kind) for kind in HALVES},
    "AWQ": partial(packed, entries=AWQ, tensors_of=as_awq),
    "GPTQ": partial(packed, entries=GPTQ, tensors_of=as_gptq),
    "GPTQ sym": partial(packed, entries=GPTQ, tensors_of=as_gptq, symmetric=True),
    "GPTQ v2": partial(packed, entries=GPTQ | SECOND, tensors_of=partial(as_gptq, less=0)),
    "GPTQ v2 sym": partial(packed, entries=GPTQ | SECOND, tensors_of=partial(as_gptq, less=0), symmetric=True),
    "GPTQ 8 bits": partial(packed, entries=GPTQ | {"bits": 8}, tensors_of=as_gptq),
    "W4A16": partial(packed, entries=compressed(4), tensors_of=as_compressed),
    "W8A16": partial(packed, entries=compressed(8), tensors_of=as_compressed),
    "torchao int4": partial(packed, entries=TORCHAO, tensors_of=as_torchao),
    "torchao int8": torchao_int8,
    "int4": lambda folder, base: (base, {"quantization": "int4"}),
    "int8": lambda folder, base: (base, {"quantization": "int8"}),
    "NF4, dequantised": dequantized_nf4,
}


def read_prompts(tokenizer: Any, file: Path, count: int, chat: bool) -> list[list[int]]:
    """Return the first 8 to 23 tokens of texts, or questions that consist of them."""
    rows = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer(text[:400], add_special_tokens=False)["input_ids"] for text in rows]
    prompts = [ids[: 8 + number % 16] for number, ids in enumerate(x for x in texts if len(x) >= 24)][:count]
    if not chat:
        return prompts
    chats = [[{"role": "user", "content": tokenizer.decode(ids)}] for ids in prompts]
    return [tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=False) for x in chats]


def decode(generate: Callable[..., Any], prompts: list[list[int]], args: argparse.Namespace, **how: Any) -> list[Any]:
    """Return the output of each batch of prompts; where `how` has a seed s, prompt i has s + i."""
    made, limits = [], {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "return_dict_in_generate": True}
    for at in range(0, len(prompts), args.rows):
        rows = prompts[at : at + args.rows]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=args.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=args.device)
        seeded = how | ({"seed": how["seed"] + at} if "seed" in how else {})
        made.append(generate(ids, attention_mask=mask, **limits, **seeded))
    return made


def compare(source: Source, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Return how many texts of each method equal those of undrafted decoding, and how many differ by near-ties."""
    base, load = source
    options = {"num_beams": 3, "draft_len_per_beam": 3, "node_budget": 6, "draft_from_text": False, "compile": False}
    engine = ReDrafter.from_pretrained(base, args.drafter, dtype="float32", device=args.device, **load, **options)
    model = engine.target.model
    table = ReDrafter.from_pretrained(model, None, **options)
    engine.pauses = table.pauses = False  # or the steps of a CPU would hardly draft
    greedy: dict[str, Any] = {"do_sample": False}
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 7}
    found: dict[str, Any] = {"form": quantized_form(model), "rounding": engine.target.rounding, "texts": len(prompts)}
    for temperature, how in (("greedy", greedy), ("T=1", sampled)):
        engines = {"transformers": model.generate, "drafter": engine.generate, "recycled": table.generate}
        undrafted = _new_tokens(decode(engine.generate, prompts, args, speculate=False, **how), args.tokens)
        for method, generate in engines.items():
            if method == "transformers" and how is sampled:
                continue
            out = decode(generate, prompts, args, **how)
            differences = find_differences(engine, how, prompts, undrafted, [_new_tokens(out, args.tokens)])
            result: dict[str, Any] = {"equal": len(prompts) - len(differences)}
            if differences:
                result["near-ties"] = sum(x.near_tie for x in differences)
                result["margins"] = [(x.prompt, x.token, x.margin, x.tolerance) for x in differences]
            if method != "transformers":
                steps = sum(x.stats.steps for x in out)
                result["tokens per step"] = round(sum(x.stats.emitted for x in out) / steps, 2)
            found[f"{method}, {temperature}"] = result
    return found


def _new_tokens(outputs: list[Any], count: int) -> list[list[int]]:
    return [row for out in outputs for row in out.sequences[:, -count:].tolist()]


def main() -> None:
    """Print a line of JSON for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of an ordinary Llama")
    parser.add_argument("--drafter", help="its drafter; recycled tokens alone without")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with texts")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--skip", type=int, default=0, help="texts that other processes compare")
    parser.add_argument("--chat", action="store_true", help="let the model answer texts instead of continuing them")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    prompts = read_prompts(AutoTokenizer.from_pretrained(args.model), args.prompts, args.skip + args.texts, args.chat)
    for name in args.formats:
        with TemporaryDirectory() as folder:
            source = FORMATS[name](Path(folder), args.model)
            found = compare(source, prompts[args.skip :], args)
        print(json.dumps({"format": name} | found), flush=True)


if __name__ == "__main__":
    main()
