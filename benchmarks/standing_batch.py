"""Time one step of batches that stand still, after contexts of any length, and drafting with heads of any size.

python benchmarks/standing_batch.py --context 1000,4000,16000 --batch-sizes 1,8 --pad-to llama-3.1-8b --model ...

Takes the flags of `redrafter bench`. Beyond the model's own context, marked by *, only times are valid.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from padded_model import bench_parser, load_pair
from redrafter.app.flags import integers, read_options
from redrafter.app.program import run_command
from redrafter.cli.measure_options import BenchOptions
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.proposer import SearchProposer
from redrafter.engine.redrafter import ReDrafter
from redrafter.errors import first_line
from redrafter.measure.decode import PromptIds
from redrafter.measure.prompts import encode, read_prompts
from redrafter.measure.steps import StandingBatch, StepWork, copy_bandwidth, measure_step
from redrafter.measure.table import format_table

ALLOCATION_STEPS = 20  # steps that allocations are counted over
STEP = ("nodes", "step_ms", "draft_ms", "draft_floor_ms", "verify_ms", "verify_floor_ms", "rest_ms")


def long_texts(prompts: PromptIds, rows: int, length: int) -> list[list[int]]:
    """Return `rows` texts of `length` tokens, cut from the prompts joined and repeated.

    Each row begins at another token of the joined prompts, so that no two rows share a prefix and so keys and values.
    """
    stream = [token for prompt in prompts for token in prompt]
    return [[stream[(row + i) % len(stream)] for i in range(length)] for row in range(rows)]


def random_drafter(drafter: DrafterModel, ids: int) -> DrafterModel:
    """Return a drafter of the same shape with random weights and a head of `ids` ids, for timing only."""
    config = copy.deepcopy(drafter.config)
    config.draft_vocab_size = None if ids == config.vocab_size else ids
    if hasattr(config, "own_head"):
        config.own_head = True
    # Random weights suffice: the time of a head depends on its shape alone.
    with torch.device("meta"):
        make: Any = type(drafter)
        module: Any = make(config)
    module = module.to(drafter.dtype).to_empty(device=drafter.device).eval().requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(std=0.02)
    if module.draft_ids is not None:
        module.draft_ids.copy_(torch.randperm(config.vocab_size)[:ids].sort().values)
    return module


def check_launch(batch: StandingBatch) -> str:
    """Say whether launching the captured step makes the CPU wait for the GPU, and how often steps allocate memory.

    The step is launched once with torch set to raise an error at a wait, then `ALLOCATION_STEPS` times, including the
    reading of their results.
    """
    batch.restore()
    torch.cuda.synchronize(batch.device)
    waited, mode = "never", torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.captured.replay()
    except RuntimeError as error:
        waited = first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    counts = []
    for steps in (0, ALLOCATION_STEPS):
        for _ in range(steps):
            batch.restore()
            batch.captured.replay().wait()
        counts.append(torch.cuda.memory_stats(batch.device)["allocation.all.allocated"])
    return f"its launch waits for the GPU: {waited}; {counts[1] - counts[0]} allocations in {ALLOCATION_STEPS} steps"


@torch.inference_mode()
def measure_contexts(
    engine: ReDrafter, prompts: PromptIds, options: BenchOptions, contexts: tuple[int, ...]
) -> Iterator[list[Any]]:
    """Yield a row of the table for each batch size, context and mode."""
    bandwidth = copy_bandwidth(engine.target.device)
    for rows in options.batch_sizes:
        for context in contexts:
            work = StepWork(engine, long_texts(prompts, rows, context), 0, options.temperature, options.seed)
            for proposer in dict.fromkeys([engine.undrafted, engine.proposer_for(rows)]):
                found = measure_step(work, proposer, bandwidth)
                limit = engine.target.context
                beyond = "*" if limit is not None and context + proposer.depth >= limit else ""
                yield [f"{rows} x {context}{beyond}", *map(found.get, STEP)]
                if engine.target.device.type == "cuda":
                    with work.hold(proposer.without_text or proposer) as batch:
                        print(f"{rows} x {context}: {check_launch(batch)}")


@torch.inference_mode()
def measure_heads(
    engine: ReDrafter, prompts: PromptIds, options: BenchOptions, sizes: tuple[int, ...]
) -> Iterator[list[Any]]:
    """Yield a row for drafting with a random head of each size, at each batch size at which drafts pay."""
    bandwidth = copy_bandwidth(engine.target.device)
    for ids in sizes:
        drafter = random_drafter(engine.drafter, ids)
        drafter.prepare(engine.target)
        for rows in options.batch_sizes:
            own = engine.proposer_for(rows)
            if isinstance(own := own.without_text or own, SearchProposer):
                proposer = replace(own, drafter=drafter)
                work = StepWork(
                    engine, [prompts[row % len(prompts)] for row in range(rows)], options.max_new_tokens // 2
                )
                found = measure_step(work, proposer, bandwidth)
                yield [f"{rows} rows, {ids} ids", found["draft_ms"], found["draft_floor_ms"]]


def main() -> int:
    """Print a table of steps, and one of heads. Returns the exit code."""
    parser = bench_parser("benchmarks/standing_batch.py")
    parser.add_argument("--context", type=integers, default=(), metavar="N,...", help="tokens before the step")
    parser.add_argument("--draft-vocab-sizes", type=integers, default=(), metavar="N,...", help="ids of random heads")
    args = parser.parse_args()

    def command() -> int:
        pair, note = load_pair(args)
        options, engine = read_options(BenchOptions, args), pair.engine
        assert isinstance(engine, ReDrafter)
        rows = [row for file in options.prompts or (None,) for row in read_prompts(file)]
        prompts = encode(rows, pair.tokenizer, **options.cut)
        print(note or pair.name)
        steps = list(measure_contexts(engine, prompts, options, args.context))
        heads = list(measure_heads(engine, prompts, options, args.draft_vocab_sizes))
        columns = ["rows x context", "nodes", "step ms", "draft", "floor", "verify", "floor", "rest"]
        print(*(format_table(columns, steps) if steps else ()), sep="\n")
        print(*(format_table(["head", "draft ms", "floor"], heads) if heads else ()), sep="\n")
        return 0

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
