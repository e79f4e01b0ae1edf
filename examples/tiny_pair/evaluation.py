"""Stage `evaluation`: tokens per step on held-out prompts, and whether any token differs from undrafted decoding.

Writes `prompts.jsonl` (the prompts), `results.json` and, with the report, all numbers of the model cards.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from data import prompts, read_rows
from recipe import Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from variants import FinalBeams, Uncoupled

from redrafter import Engine, GenerateOutput, RecurrentDrafter, ReDrafter
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.drafting.proposer import Proposer
from redrafter.model.target import Target
from redrafter.sampling.noise import gumbel

NODE_BUDGETS = (4, 6, 8, 10, 12, 16, 20)
BATCH_SIZE = 200


class Measure:
    """Runs an engine over all prompts, in batches of rows of unequal length."""

    def __init__(self, target: Target, tokenizer: PreTrainedTokenizerBase, starts: list[dict[str, Any]], new: int):
        self.target, self.tokenizer, self.starts, self.new = target, tokenizer, starts, new

    def outputs(self, proposer: Proposer, **how: Any) -> Iterator[GenerateOutput]:
        """Yield the output of each batch; `how` may hold `temperature`, `speculate` and `logits`."""
        for first in range(0, len(self.starts), BATCH_SIZE):
            part = [start["ids"] for start in self.starts[first : first + BATCH_SIZE]]
            batch = self.tokenizer.pad({"input_ids": part}, return_tensors="pt").to(self.target.device)
            temperature = how.get("temperature", 0)
            sampling: dict[str, Any] = {"do_sample": bool(temperature)}
            if temperature:
                sampling |= {"temperature": temperature, "top_k": 0, "seed": 1000 + first}
            out = Engine(self.target, proposer).generate(
                batch.input_ids,
                batch.attention_mask,
                max_new_tokens=self.new,
                return_dict_in_generate=True,
                speculate=how.get("speculate", True),
                output_logits=how.get("logits", False),
                **sampling,
            )
            assert isinstance(out, GenerateOutput)
            yield out

    def tokens_per_step(self, proposer: Proposer, temperature: float) -> dict[str, Any]:
        """Measure tokens per step over all rows and for each source, and how often each depth was reached."""
        emitted, steps, depths = Counter[str](), Counter[str](), Counter[int]()
        sources = iter(start["source"] for start in self.starts)
        for out in self.outputs(proposer, temperature=temperature):
            assert out.stats is not None
            for row in out.stats.rows:
                source = next(sources)
                emitted[source] += row.emitted
                steps[source] += row.steps
                depths.update(dict(enumerate(row.accepted_by_depth, start=1)))
        return {
            "all": emitted.total() / steps.total(),
            "by_source": {source: round(emitted[source] / steps[source], 3) for source in sorted(emitted)},
            "reached_depth": [round(depths[d] / steps.total(), 3) for d in range(1, proposer.depth + 1)],
        }

    def divergences(self, proposer: Proposer, temperature: float) -> dict[str, Any]:
        """Find the rows whose tokens differ from undrafted decoding's.

        Each is reported with undrafted decoding's margin between its two best scores where the texts part, temperature
        and noise included.
        """
        margins = []
        starts = iter(self.starts)
        plain = self.outputs(proposer, temperature=temperature, speculate=False, logits=True)
        for ours, theirs in zip(self.outputs(proposer, temperature=temperature), plain, strict=True):
            assert theirs.logits is not None
            assert theirs.stats is not None
            width = theirs.sequences.shape[1] - len(theirs.logits)
            for row, (a, b) in enumerate(zip(ours.sequences.tolist(), theirs.sequences.tolist(), strict=True)):
                position = len(next(starts)["ids"])  # of the first new token
                parted = next((i for i, (x, y) in enumerate(zip(a[width:], b[width:], strict=False)) if x != y), None)
                if parted is not None:
                    scores = theirs.logits[parted][row].float()
                    if temperature:
                        seed = torch.tensor([theirs.stats.seeds[row]], device=scores.device)
                        at = torch.tensor([[position + parted]], device=scores.device)
                        ids = torch.arange(len(scores), device=scores.device)
                        scores = scores / temperature + gumbel(seed, at, ids)[0, 0]
                    first, second = scores.topk(2).values.tolist()
                    margins.append(first - second)
        return {"rows": len(self.starts), "diverged": len(margins), "margins": [round(m, 4) for m in margins]}


def make(recipe: Recipe, into: Path) -> dict[str, Any]:
    """Measure the pair in fp32, and count divergences in half precision too."""
    out, device = Path(recipe.out), recipe.torch_device
    tokenizer = AutoTokenizer.from_pretrained(out / "base", padding_side="left")
    rows = read_rows(recipe.data, recipe.exclude)
    starts = prompts(rows, tokenizer, recipe.evaluation_prompts, split="val", tokens=64, seed=recipe.seed)

    def load(dtype: torch.dtype) -> tuple[Measure, RecurrentDrafter]:
        model = AutoModelForCausalLM.from_pretrained(out / "base", dtype=dtype).to(device)
        drafter = RecurrentDrafter.from_pretrained(out / "drafter", dtype=dtype).to(device).eval()
        target = ReDrafter(Target(model), drafter).target  # which now also keeps what this drafter reads
        return Measure(target, tokenizer, starts, recipe.evaluation_new), drafter

    torch.backends.cuda.matmul.allow_tf32 = False
    measure, drafter = load(torch.float32)
    beams, depth = recipe.drafter_beams, recipe.drafter_len

    def lattice(nodes: int = 1 + beams * depth) -> RecurrentProposer:
        return RecurrentProposer(drafter, measure.target, beams, depth, nodes)

    variants: dict[str, Proposer] = {
        "final beams": FinalBeams(lattice(), tokenizer.pad_token_id),
        "lattice": Uncoupled(lattice()),
        "lattice, coupled": lattice(),
    }
    began = time.perf_counter()
    results: dict[str, Any] = {
        "tokens_per_step": {
            name: {f"T={t:g}": measure.tokens_per_step(proposer, t) for t in (0, 0.5, 1.0)}
            for name, proposer in variants.items()
        },
        "greedy_by_budget": {n: measure.tokens_per_step(lattice(n), 0)["all"] for n in NODE_BUDGETS},
        "divergences": {},
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        measure, drafter = load(dtype)
        results["divergences"][str(dtype)] = {f"T={t:g}": measure.divergences(lattice(), t) for t in (0, 1.0)}
    into.mkdir()
    with (into / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"source": s["source"], "prompt": s["prompt"]}) + "\n" for s in starts)
    (into / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, at in results["tokens_per_step"].items():
        print(f"  {name:18s}" + "".join(f"  {t} {found['all']:.3f}" for t, found in at.items()))
    print("  greedy by node budget", {n: round(found, 3) for n, found in results["greedy_by_budget"].items()})
    return {"prompts": len(starts), "measured_seconds": round(time.perf_counter() - began, 1), **results}
