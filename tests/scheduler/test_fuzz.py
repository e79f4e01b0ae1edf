"""A fuzz of the scheduler: random models, drafters, memories and changes; tokens are those of undrafted decoding.

An episode is a function of its seed, which a failure names. True paths are written into the drafters' trees, since
untrained drafters are seldom right and a tree of which nothing is accepted shows little. Environment variables choose
more episodes, and where they begin: REDRAFTER_FUZZ_EPISODES and REDRAFTER_FUZZ_SEED.
"""

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.dflash import DFLASH_FORMS, random_block_drafter
from helpers.drafters import FORMS as RECURRENT_FORMS
from helpers.drafters import random_drafter
from helpers.eagle import EAGLE_FORMS, random_head
from helpers.features import ENGINES, FEATURES, recurrent, recycled, sized
from helpers.models import new_pool, tiny_model
from helpers.mtp import FORMS as MTP_FORMS
from helpers.mtp import random_mtp
from helpers.recurrent import RECURRENT, recurrent_model
from helpers.right_drafts import RightDrafts
from helpers.scheduling import (
    KINDS,
    alone,
    arguments_of,
    change,
    dense_scheduler,
    make_sequence,
    nothing_is_held,
    scheduler,
)
from redrafter import Engine, ReDrafter
from redrafter.cache import block_manager
from redrafter.drafting import recycled as table
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.engine.changes import ChangeDrafter, Sleep, UpdateWeights, Wake
from redrafter.engine.options import EngineOptions
from redrafter.features import RECURRENT_STATES
from redrafter.model.target import Target
from redrafter.sampling.processors import ThinkingBudget
from redrafter.scheduler import prefill, running_batch
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence
from redrafter.tree.sizes import TreeShape

EPISODES = int(os.environ.get("REDRAFTER_FUZZ_EPISODES", "8"))
FIRST_SEED = int(os.environ.get("REDRAFTER_FUZZ_SEED", "0"))
STEM_LENGTHS = (1, 5, 15, 16, 17, 31, 32, 33, 48, 60)  # both sides of the ends of blocks

ROPE = {"rope_theta": 10000.0, "factor": 4.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 40,
    "partial_rotary_factor": 1.0,
}
SHARED_LAYERS = {
    "sliding_window": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 97,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    name: feature.model
    for name, feature in FEATURES.items()
    if not (feature.images or feature.adapters or feature.options)
}
MODELS |= {
    "yarn": lambda: tiny_model(
        "llama", rope_parameters=ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 24}
    ),
    "dynamic": lambda: tiny_model("llama", rope_parameters=ROPE | {"rope_type": "dynamic"}, max_position_embeddings=40),
    "longrope": lambda: tiny_model(
        "phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=40, max_position_embeddings=160
    ),
    "window of 2": lambda: tiny_model("mistral", sliding_window=2),
    "experts": lambda: tiny_model("qwen3_moe"),
    "shared layers": lambda: tiny_model("gemma4_text", **SHARED_LAYERS),
}
MODELS |= {name: lambda name=name: recurrent_model(name) for name in RECURRENT if not name.startswith("zamba")}
HAS_STATES = {"states", "convolutions", *RECURRENT}


def any_of(forms: dict[str, dict], make: Callable[..., Any], model: PreTrainedModel, choices: random.Random) -> Any:
    """Make a drafter of a random form for a model."""
    return make(**forms[choices.choice(list(forms))], **sized(model))


def engine_of(kind: str, name: str, options: EngineOptions, choices: random.Random) -> Engine:
    """Make an engine of a kind on a fresh model whose sequences do not end by themselves."""
    form = choices.choice(list(MTP_FORMS))
    model = deepcopy(MTP_FORMS[form].model() if kind == "MTP" else MODELS[name]())
    model.generation_config.eos_token_id = None
    shape = TreeShape(choices.choice((1, 2, 4)), choices.choice((2, 3, 4)), choices.choice((5, 9, 999)))
    if kind == "recurrent":
        return recurrent(model, options, shape, any_of(RECURRENT_FORMS, random_drafter, model, choices))
    if kind == "EAGLE":
        return recurrent(model, options, shape, any_of(EAGLE_FORMS, random_head, model, choices))
    if kind == "DFlash":
        return recurrent(model, options, shape, any_of(DFLASH_FORMS, random_block_drafter, model, choices))
    if kind == "MTP":
        target = Target(model)
        return ReDrafter(target, random_mtp(target, MTP_FORMS[form]), shape, options=options)
    if kind == "recycled":
        return recycled(model, options, shape)
    names = [each for each in ENGINES if not each.startswith("MTP") and (name not in HAS_STATES or "text" not in each)]
    return ENGINES[choices.choice(names)](model, options)


@dataclass
class Episode:
    """One scheduler, and the sequences that it serves.

    Attributes:
        kind: How its engine drafts.
        seed: What all of it follows from.
        on_host: Whether it has few blocks and many on the host.
    """

    kind: str
    seed: int
    on_host: bool

    def run(self) -> Counter[str]:
        """Serve all sequences, compare each with undrafted decoding, and return what happened how often."""
        choices = self._choices = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self._name = choices.choice(list(MODELS))
        options = EngineOptions(draft_from_text=choices.random() < 0.5, max_prefix_states=choices.choice((0, 2, 64)))
        self._engine = engine_of(self.kind, self._name, options, choices)
        self._undrafted = Engine(Target(deepcopy(self._engine.model)), UndraftedProposer())
        self._served, counts = self._scheduler(), Counter[str]()
        self._written: dict[TokenSequence, list[int]] = {}
        drafts = RightDrafts([], self.seed)
        sequences = self._sequences(choices.randrange(6, 11) if self.on_host else choices.randrange(3, 10))
        for each in sequences:
            self._written[each] = alone(self._undrafted, each)
        drafts.texts = [[*each.request.prompt, *written] for each, written in self._written.items()]
        with drafts.drafted():
            cancelled = self._serve(sequences)
            # Once more those that came first: their blocks are on the host by now, where there is one.
            oldest = sequences[-4:]
            again = [
                make_sequence(list(each.request.prompt), each.request.max_new_tokens, each.request.params)
                for each in oldest
            ]
            for each, first in zip(again, oldest, strict=True):
                self._written[each] = self._written[first]
                change(each, cache_salt=first.request.cache_salt)
            cancelled |= self._serve(again)
            counts["calls that ended early"] = self._await_calls(sequences)
        for each in [*sequences, *again]:
            counts.update(self._check(each, each in cancelled))
        counts["off chain"] = drafts.off_chain
        if not self._dense:
            nothing_is_held(self._served)
            managers = self._served.memory.blocks, self._served.memory.draft_blocks
            counts["onboarded"] = sum(blocks.onboarded for blocks in managers if blocks is not None)
        served = self._served.running_set
        assert not any((served.running, served.waiting)), self
        counts["preempted"] = served.preempted
        return counts

    def _scheduler(self) -> Scheduler:
        """Return a scheduler with random limits and memory."""
        choices, engine = self._choices, self._engine
        rows = choices.choice((1, 2) if self.on_host else (1, 2, 3, 5, 8))
        self._dense = not self.on_host and choices.random() < 0.15
        if self._dense:
            return dense_scheduler(engine, rows)
        stores_keys = bool(new_pool(engine, engine.target, 4).pools)
        if engine.draft_model is not None:
            stores_keys &= bool(new_pool(engine, engine.draft_model, 4).pools)
        if RECURRENT_STATES in engine.target.features and not engine.options.max_prefix_states:
            stores_keys = False  # nothing that is stored would be found
        most = 30 if engine.draft_vocabulary is not None else 14
        served = scheduler(
            engine,
            blocks=most + choices.choice((0, 2)) if self.on_host else max(most, choices.choice((14, 24, 60, 200))),
            host_blocks=60 if self.on_host and stores_keys else 0,
            max_batch_size=rows,
            max_num_tokens=choices.choice((1, 8, 16, 40, 8192)),
            chunked=choices.random() < 0.8,
            guaranteed_no_evict=choices.random() < 0.25,
            admit_together=choices.choice((1, 1, 2)),
            reuse=self.on_host or choices.random() < 0.85,
            bulk=self.seed % 3 == 0,
        )
        served.overlap = choices.random() < 0.6  # as on a GPU
        served.mixed_prefill = served.overlap and served.prefiller.can_mix and choices.random() < 0.8
        return served

    def _sequences(self, count: int) -> list[TokenSequence]:
        """Return sequences of all kinds, many of which begin alike."""
        choices = self._choices
        longest = min(self._served.longest, 150 if self._name == "dynamic" else 400, choices.choice((60, 90, 140)))
        lengths = STEM_LENGTHS[-4:] if self.on_host else STEM_LENGTHS
        stems = [[choices.randrange(3, 90) for _ in range(choices.choice(lengths))] for _ in range(3)]
        sequences = []
        for _ in range(count):
            stem = choices.choice(stems)
            prompt = stem[: choices.choice((len(stem), choices.randrange(1, len(stem) + 1)))]
            prompt += [choices.randrange(3, 90) for _ in range(choices.choice((0, 0, 1, 2, 10)))]
            if choices.random() < 0.3:  # a loop, which drafts are copied from
                prompt = (prompt[-6:] * 10)[: choices.choice((20, 33, 50))]
            prompt = prompt[: longest - 3]
            params = replace(choices.choice(list(KINDS.values())), seed=choices.randrange(50))
            if (share := choices.random()) > 0.75:
                limit = min(1, self._served.batch.depth) if share < 0.85 else 0
                params = replace(params, num_speculative_tokens=limit)
            if choices.random() < 0.4:  # an end that no kind of sequence forbids
                params = replace(params, thinking=ThinkingBudget(choices.randrange(30), choices.randrange(33, 90)))
            new = min(choices.choice((2, 5, 20, 40, 40, 400)), longest - len(prompt))
            sequence = make_sequence(prompt, new, params)
            who = {"client": choices.choice("abc"), "priority": choices.choice((0, 0, 0, 2, -1))}
            change(sequence, cache_salt=choices.choice((None, None, None, "salt")), **who)
            sequences.append(sequence)
        return sequences

    def _serve(self, sequences: list[TokenSequence]) -> set[TokenSequence]:
        """Submit sequences at random times, cancel some and change the engine; return those that were cancelled."""
        choices, served, cancelled = self._choices, self._served, set[TokenSequence]()
        left, sent, asleep = list(sequences), list[TokenSequence](), False
        changes = not self._dense and choices.random() < 0.25
        for _ in range(6000):
            while left and choices.random() < 0.4:
                sent.append(left.pop())
                served.submit(sent[-1])
            if sent and choices.random() < 0.04:
                one = choices.choice(sent)
                cancelled.add(one)
                served.cancel(one)
            if changes and choices.random() < 0.05:
                asleep = self._change(asleep)
            served.round()
            if served.idle and not left and not asleep:
                return cancelled
        raise AssertionError(f"{self} does not end")

    def _await_calls(self, sequences: list[TokenSequence]) -> int:
        """Write some sequences by coroutines at once, of which one is left midway; return how many ended early."""
        of_calls = [
            each for each in sequences if each.request.params.thinking is None
        ]  # of which `generate` has no argument
        of_calls = sorted(of_calls, key=lambda each: len(self._written[each]))[-2:]
        submitted, submit = list[TokenSequence](), Scheduler.submit

        def noted(served: Scheduler, *new: TokenSequence) -> None:
            submitted.extend(new)
            submit(served, *new)

        async def write(sequence: TokenSequence, leaves: bool) -> None:
            tokens, written = list[int](), self._engine.astream(**arguments_of(sequence))
            async for token in written:
                tokens.append(token)
                if leaves:
                    await written.aclose()
            assert tokens == self._written[sequence][: len(tokens) if leaves else None], (self, self._name)

        async def write_all() -> None:
            await asyncio.gather(*(write(each, each is of_calls[-1]) for each in of_calls))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "submit", noted)
            asyncio.run(write_all())
            for thread in threading.enumerate():
                if thread.name == "redrafter-async":
                    thread.join()
        assert all(each.ended for each in submitted), self
        return sum(each.cancelled and each.written < each.request.max_new_tokens for each in submitted)

    def _change(self, asleep: bool) -> bool:
        """Change the engine so that it writes the same tokens; return whether it sleeps then."""
        engine, change = self._engine, "wake" if asleep else self._choices.choice(("sleep", "weights", "drafter"))
        if change == "sleep":
            self._served.change(Sleep(engine))
        elif change == "wake":
            self._served.change(Wake(engine))
        elif change == "weights":
            weights = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
            self._served.change(UpdateWeights(engine, weights))
        elif self.kind in ("recurrent", "EAGLE", "DFlash"):
            other = deepcopy(engine.drafter)
            with torch.no_grad():
                for weight in other.parameters():
                    weight.add_(torch.randn_like(weight) * 0.05)
            self._served.change(ChangeDrafter(engine, other))
        return change == "sleep"

    def _check(self, sequence: TokenSequence, cancelled: bool) -> dict[str, int]:
        """Fail unless a sequence has the tokens of undrafted decoding, as many as it was given time for."""
        last, expected = sequence.sink.deltas[-1], self._written[sequence]
        where = f"{self}: {self._name}, a prompt of {len(sequence.request.prompt)} tokens"
        assert last.error is None, (where, last.error)
        if last.finish == "cancelled":
            assert cancelled, where
            expected = expected[: len(sequence.sink.tokens)]
        assert sequence.sink.tokens == expected, where
        return {"accepted": sequence.stats.accepted, "reused": sequence.reused, "sequences": 1}


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(running_batch.MIN_POSITIONS, "cpu", 32)
    monkeypatch.setattr(block_manager, "MIN_SAVED", 1)
    monkeypatch.setattr(running_batch, "ROWS_PER_EMPTY_ROW", 2)
    monkeypatch.setattr(prefill, "BULK_ROWS", 2)
    monkeypatch.setattr(table, "LEAST_SCORE", -3.0)  # random models find all tokens unlikely


KINDS_OF_DRAFTERS = ("recurrent", "EAGLE", "DFlash", "MTP", "recycled", "others")
SEEDS = range(FIRST_SEED, FIRST_SEED + EPISODES)
SLOW = [pytest.param(kind, SEEDS, marks=pytest.mark.slow) for kind in KINDS_OF_DRAFTERS]


@pytest.mark.filterwarnings("ignore:Unfeasible length", "ignore:ThoughtLimit")
@pytest.mark.parametrize(("kind", "seeds"), [("recurrent", (2, 7)), *SLOW])
def test_random_episodes_write_what_plain_decoding_writes(kind, seeds):
    counts = Counter[str]()
    for seed in seeds:
        counts += Episode(kind, seed, on_host=seed % 2 == 0).run()
    assert counts["accepted"] > counts["sequences"], counts
    assert counts["reused"], counts
    assert counts["onboarded"], counts
    assert counts["preempted"], counts
    assert counts["calls that ended early"], counts
    assert counts["off chain"] or kind == "others", counts
