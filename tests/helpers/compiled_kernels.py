"""Compiles Triton kernels for a Hopper GPU where there is none, and prints what they need, as JSON.

A kernel is launched on tensors of the CPU; the launch compiles it as on a GPU and runs nothing. This is a program of
its own since Triton's interpreter, which other tests use, cannot be left again.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from helpers.attention import problem
from helpers.outcomes import random_outcome, random_scores
from redrafter import kernels
from redrafter.kernels.grouped_weight import quantize_groups
from redrafter.kernels.launch import widening_assembly

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER = GPUTarget("cuda", 90, 32)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Driver:
    """Stands for the driver of a GPU that only kernels are compiled for."""

    def get_current_target(self):
        return HOPPER

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def attend(
    lengths: list[int], nodes: int, heads: int = 2, width: int = 128, dtype: torch.dtype = torch.bfloat16, **how: Any
) -> Callable[[], object]:
    how |= {"scale": 0.1, "window": 33 if how.get("causal") else 0}
    inputs = problem(lengths, nodes, heads=heads, group=4, dk=width, dv=width, dtype=dtype, **how)
    return lambda: kernels.attention.tree_attention(inputs)


def attend_in_order(lengths: list[int], nodes: int, **how: Any) -> Callable[[], object]:
    inputs = problem(lengths, nodes, heads=2, group=4, dk=128, dv=128, dtype=torch.bfloat16, scale=0.1, **how)
    return lambda: kernels.ordered_attention.ordered_attention(inputs)


def search(beams: int, vocab: int) -> Callable[[], object]:
    scores = torch.zeros(1, beams, vocab)
    return lambda: kernels.tree.top_continuations(scores, torch.zeros(1, beams), beams, None)


def search_part(beams: int, vocab: int, part: int) -> Callable[[], object]:
    scores = torch.zeros(1, beams, part)
    shared: dict[str, Any] = {"vocabulary": vocab, "first": vocab - part, "share": lambda message: message}
    return lambda: kernels.tree.top_continuations(scores, torch.zeros(1, beams), beams, None, **shared)


def multiply(tokens: int, features: int, inner: int = 512, *, widened: bool = False) -> Callable[[], object]:
    x, weight = torch.zeros(tokens, inner, dtype=torch.bfloat16), torch.zeros(features, inner).to(torch.float8_e4m3fn)
    scales = torch.ones(tokens), torch.ones(features)
    if widened:
        return lambda: kernels.linear.widened_product(x, weight, scales[1], None)
    return lambda: kernels.float8_matmul.float8_product(x.to(weight.dtype), scales[0], weight, scales[1], None, x.dtype)


def accept(nodes: int, **how: bool) -> Callable[[], object]:
    drawn = random_outcome(2, nodes, **how)
    tree, width = drawn.pop("tree"), drawn.pop("max_depth") + 1
    shape = {"levels": tree.levels, "width": width, "grafted": tree.grafted, "counts": tree.counts}
    return lambda: kernels.accept.accept_drafts(tree.tokens, tree.parents, tree.depth, **drawn, **shape)


def order(rows: int, nodes: int) -> Callable[[], object]:
    tree = random_outcome(rows, nodes, shared=True, limited=False)["tree"]
    length, table = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, 4, dtype=torch.int32)
    return lambda: (
        kernels.token_order.token_order(tree.counts, nodes, tree.total),
        kernels.token_order.new_slots(tree.parents, tree.depth, length, table, nodes),
    )


def add_peers(ranks: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return a program that adds messages of GPUs that write to each other's memory."""
    calls = torch.zeros(kernels.peer_sum.peer_sum_parts(32 << 10), dtype=torch.int32)
    x, inboxes = torch.ones(2, 4096, dtype=dtype), torch.zeros(ranks).long()
    return lambda: (
        kernels.peer_sum.peer_sum(x, inboxes, calls, 1, 32 << 10),
        kernels.peer_sum.peer_sum_by_shares(x, inboxes, calls, 1, 32 << 10),
    )


def draw(noise: torch.Tensor | None, row: torch.Tensor | None) -> Callable[[], object]:
    logits, depth = torch.zeros(1, 3, 5000).bfloat16(), torch.zeros(1, 3).long()
    return lambda: kernels.sample.draw_tokens(logits, torch.ones(1), noise, depth, row)


def hold(rows: int, nodes: int, total: int, *, by_row: bool = False) -> Callable[[], object]:
    tree = random_outcome(rows, nodes, shared=not by_row, limited=False)["tree"]
    nodes_of = tree.tokens, tree.parents, tree.depth, random_scores(tree)
    return lambda: kernels.tree.hold_best(*nodes_of, total, by_row=by_row)


PROGRAMS = {
    "attention of one node": attend([40], 1),
    "attention of a tree": attend([40], 26),
    "attention of many trees": attend([40] * 80, 26),
    "attention of chains within a window": attend([40, 3], 7, causal=True),
    "attention of a tree over an FP8 cache": attend([40], 26, kv_dtype=FP8),
    "attention of one node over an FP8 cache": attend([40], 1, kv_dtype=E5M2),
    "attention of one node and one head over a long FP8 cache": attend([9000], 1, heads=1, kv_dtype=FP8),
    "attention beside chunks": attend([40], 6, chunks=[(10, 30)], room=4),
    "attention of float32 heads of 128": attend([40], 26, dtype=torch.float32, chunks=[(10, 30)], room=4),
    "attention of float32 heads of 256": attend([40], 26, width=256, dtype=torch.float32, chunks=[(10, 30)], room=4),
    "attention of heads of 256": attend([40], 1, width=256),
    "attention of heads of 512": attend([40], 26, width=512, chunks=[(10, 30)], room=4),
    "attention of one node and a head of 512": attend([40], 1, width=512),
    "attention in order": attend_in_order([40], 26),
    "attention in order of many rows": attend_in_order([40] * 80, 6),
    "attention in order over an FP8 cache": attend_in_order([40], 26, kv_dtype=FP8),
    "search with 5 beams": search(5, 128_256),
    "search of a part of the ids": search_part(5, 128_256, 63_744),
    "search with 32 beams": search(32, 128_256),
    "search with 48 beams": search(48, 128_256),
    "search with 64 beams": search(64, 262_144),
    "acceptance of a token": accept(1, shared=False, limited=False),
    "acceptance of shared nodes": accept(41, shared=True, limited=True),
    "order of the tokens of 512 rows": order(512, 26),
    "noise": lambda: kernels.sample.gumbel(torch.zeros(2).long(), torch.zeros(2, 3).long(), torch.arange(5000)),
    "scores of drafts under noise": lambda: kernels.sample.noisy_scores(
        torch.zeros(2, 3, 5000).bfloat16(), torch.ones(2), torch.zeros(2, 9000), torch.arange(5000)
    ),
    "draws": draw(None, None),
    "draws under noise at nodes of any rows": draw(torch.zeros(1, 2, 5000), torch.zeros(1, 3).long()),
    "nodes that 32 rows share": hold(32, 26, 64),
    "nodes that two rows share": hold(2, 641, 4),
    "best nodes of each row": hold(8, 26, 8, by_row=True),
    "sum of bfloat16 over two GPUs": add_peers(2, torch.bfloat16),
    "sum of float32 over eight GPUs": add_peers(8, torch.float32),
    "product of few tokens": lambda: kernels.linear.split_k_linear(*(torch.ones(n, 512).bfloat16() for n in (5, 4096))),
    "residual layer of few tokens": lambda: kernels.linear.split_k_linear(
        *(torch.ones(*n, dtype=torch.bfloat16) for n in ((5, 4096), (4096, 4096), (4096,))), residual=True
    ),
    "FP8 product of few tokens": multiply(5, 6144),
    "FP8 product of a tree": multiply(26, 12288),
    "FP8 product in parts": multiply(26, 4096, 4096),
    "FP8 product of many tokens": multiply(200, 12288),
    "widened product of few tokens": multiply(5, 6144, widened=True),
    "widened product of many tokens": multiply(200, 12288, widened=True),
    "dequantising groups": lambda: kernels.widen_groups.widen_grouped(
        quantize_groups(torch.zeros(64, 4096), 4), torch.bfloat16
    ),
    "rounding to FP8": lambda: kernels.float8_rounding.round_to_float8(torch.ones(3, 14336, dtype=torch.bfloat16)),
    "rounding to numbers of FP8": lambda: kernels.float8_rounding.round_values(
        torch.ones(3, 32768, dtype=torch.float16)
    ),
}


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of registers that a kernel keeps in memory, for lack of room."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", out)[1])


def main() -> None:
    """Compile what each program launches."""
    driver.set_active(Driver())
    run, launched = JITFunction.run, []

    def compile_alone(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **how: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **how)
        launched.append([self.__name__, stack_bytes(kernel.asm["cubin"]), kernel.metadata.shared])

    JITFunction.run = compile_alone
    torch.version.cuda = "13.0"
    gpu = torch.device("cuda")
    for name in ("cache_tiles", "linear", "float8_matmul", "float8_rounding", "peer_sum"):
        module = import_module(f"redrafter.kernels.{name}")
        module.supports_dependent_launch = lambda device: True
        module.widening_assembly = lambda narrow, wide, device: widening_assembly(narrow, wide, gpu)
    found = {}
    for name, program in PROGRAMS.items():
        launched.clear()
        try:
            program()
            found[name] = list(launched)
        except Exception as error:
            found[name] = str(error)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
