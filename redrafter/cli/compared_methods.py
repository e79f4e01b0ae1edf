"""The drafting methods that `redrafter compare` measures, each with its timed runs and its result."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from redrafter.app.engines import (
    DRAFT_MODEL,
    DRAFTER,
    DRAFTING_METHODS,
    PROMPT_LOOKUP,
    check_method_options,
    draft_shape,
    drafting_model_name,
    load_engine,
)
from redrafter.app.loading import Pair
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.checkpoints.merged import holds_drafter
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.engine.call import GenerateStats
from redrafter.measure.differences import Difference, find_differences
from redrafter.measure.run import Repeats, Run, Stopwatch, describe_stats
from redrafter.scheduler.sequence import Stats

__all__ = ["ASSISTED", "AssistedMethod", "Method", "load_pairs", "measure_result"]

ASSISTED = "HF assisted"


@dataclass
class Method(Repeats):
    """A method of decoding and its runs.

    Attributes:
        pair: The target with the engine of this method.
        generation: How to generate.
    """

    pair: Pair = field(kw_only=True)
    generation: GenerationOptions = field(kw_only=True)

    @property
    def exact(self) -> bool:
        """Whether the method promises the tokens of plain decoding."""
        return not (self.pair.engine.rejection_sampling and self.generation.sampling)

    def run(self, batch: Sequence[Sequence[int]], generation: GenerationOptions) -> Run:
        """Decode a batch of prompts, given as token ids, and time it."""
        self.pair.engine.forget_prefixes()
        return self.pair.run(batch, generation, streamer=None)


@dataclass
class AssistedMethod(Method):
    """Assisted generation of transformers with the pair's draft model and transformers' own settings.

    A step is a forward pass of the target; the first one reads the prompt too.

    Attributes:
        draft_tokenizer: The draft model's tokenizer, where it is another one than the target's; else None.
    """

    draft_tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def exact(self) -> bool:
        """Whether the tokens are those of plain decoding: not when sampling, since transformers draws other noise."""
        return not self.generation.sampling

    def run(self, batch: Sequence[Sequence[int]], generation: GenerationOptions) -> Run:
        """Decode prompts, given as token ids, one after the other, and time that."""
        model, draft = self.pair.engine.model, self.pair.engine.draft_model
        assert draft is not None
        arguments = self.pair.arguments(generation)
        seed = arguments.pop("seed") or 0
        del arguments["speculate"]
        if self.draft_tokenizer is not None:
            arguments |= {"tokenizer": self.pair.tokenizer, "assistant_tokenizer": self.draft_tokenizer}
        texts, stats = [], []
        with Stopwatch(model.device) as watch:
            for row, prompt in enumerate(batch):
                ids = torch.tensor([prompt], device=model.device)  # [1, P]
                torch.manual_seed(seed + row)
                forwards = Counter[str]()
                hook = model.register_forward_hook(lambda *_, forwards=forwards: forwards.update(["target"]))
                mask = torch.ones_like(ids)
                try:
                    out = model.generate(ids, attention_mask=mask, assistant_model=draft.model, **arguments)
                finally:
                    hook.remove()
                texts.append(out[0, len(prompt) :].tolist())
                stats.append(Stats(steps=forwards["target"], emitted=len(texts[-1])))
        return Run(texts, GenerateStats.of(stats, None), watch.seconds)


def load_pairs(name: str, load: LoadOptions, draft: DraftOptions) -> list[Pair]:
    """Load one pair for each drafting method that can be used, all on one target.

    Args:
        name: Directory or hub id of the target.
        load: How to load it; a drafter in it, or in a merged checkpoint, is one method.
        draft: A draft model in it is another method. Prompt lookup needs nothing.
    """
    has_drafter = load.drafter is not None or holds_drafter(name)
    usable = {DRAFTER: has_drafter, DRAFT_MODEL: draft.draft_model is not None, PROMPT_LOOKUP: True}
    methods = [method for method in DRAFTING_METHODS if usable[method]]
    check_method_options(load, draft, set(methods))
    tokenizer = load_tokenizer(name, trust_remote_code=load.trust_remote_code)
    pairs: list[Pair] = []
    for method in methods:
        engine = load_engine(method, pairs[0].engine.target if pairs else name, load, draft)
        pairs.append(Pair(name, method, drafting_model_name(method, name, load, draft), tokenizer, engine))
    engines = [pair.engine for pair in pairs]
    lender = next((engine for engine in engines if engine.draft_model is not None), engines[0])
    for engine in engines:
        lender.lend_to(engine)
    return pairs


def measure_result(method: Method, plain: Method, prompts: Sequence[Sequence[int]], *, compare: bool) -> dict[str, Any]:
    """Summarise the runs of a method, and compare its outputs with those of plain decoding.

    Args:
        method: The method, after its runs.
        plain: Plain decoding, after as many repeats.
        prompts: Token ids of each prompt.
        compare: Whether to compare the outputs, if the method promises those of plain decoding.

    Returns:
        An entry of `ways` in the JSON document: the method (`way`), the `name` of its drafter or draft model and the
        `shape` that it drafts, where it has such; `tokens`; `seconds`, `tokens_per_second` and `speedup` over plain
        decoding, each the median over repeats; how speculation went in the first repeat; how many outputs are the
        `same` and how many differ at `near_ties`, None where they are not compared; prompt and token of the
        `first_difference` that is no near-tie; and the worst of the `differences` of each output that differs.
    """
    rows = max(len(run.tokens) for run in method.repeats[0])
    same = near_ties = None
    differences: list[Difference] = []
    if method is not plain and method.exact and compare:
        outputs = [method.texts(repeat) for repeat in range(len(method.repeats))]
        arguments, decode = plain.pair.arguments(plain.generation), plain.pair.tokenizer.decode
        differences = find_differences(plain.pair.engine, arguments, prompts, plain.texts(), outputs, decode)
        same, near_ties = len(prompts) - len(differences), sum(difference.near_tie for difference in differences)
    pair = method.pair
    true_differences = ((each.prompt, each.token) for each in differences if not each.near_tie)
    return {
        "way": pair.method,
        "name": pair.drafting_model,
        "shape": draft_shape(pair.engine.proposer_for(rows)) if pair.method in DRAFTING_METHODS else None,
        "tokens": sum(map(len, method.texts())),
        "seconds": statistics.median(method.seconds),
        "tokens_per_second": statistics.median(method.tokens_per_second),
        "speedup": method.speedup(plain),
        **describe_stats(method.stats),
        "same": same,
        "near_ties": near_ties,
        "first_difference": next(true_differences, None),
        "differences": differences,
    }
