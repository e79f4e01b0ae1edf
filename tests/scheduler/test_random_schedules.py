"""Random schedules: whatever comes, waits, gives way, is cancelled or begins alike, each text is what it is alone.

A schedule is a function of its seed, which a failure names. Lengths of prompts lie on both sides of the sizes of blocks
and of the batch's buffers, so that unlike ones meet in one forward.
"""

import random
from dataclasses import dataclass, replace

import pytest
from transformers import PreTrainedModel

from helpers.features import make_engine
from helpers.generation import noted
from helpers.models import VOCAB, tiny_model
from helpers.scheduling import KINDS, Sink, alone, dense_scheduler, make_sequence, nothing_is_held, scheduler
from redrafter import Engine
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler import running_batch
from redrafter.scheduler.prefill import ChunkBuffers
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence

POSITIONS = 32  # of the smallest buffers here, so that prompts of some hundred tokens are larger than several sizes
SIZES = (BLOCK_SIZE, POSITIONS, 2 * POSITIONS, 4 * POSITIONS)
LENGTHS = [1, 5, *(size + off for size in SIZES for off in (-1, 0, 1)), 170]
MAX_NEW = 24
LONGEST_BLOCKS = 14  # of a text of the greatest length, with what a step may overshoot; in another vocabulary, 24


NAMES = ("drafter", "context", "draft model's tree", "other vocabulary", "prompt lookup")


def model() -> PreTrainedModel:
    return tiny_model("llama", max_position_embeddings=512)


@dataclass(frozen=True)
class Text:
    """A prompt, how it is continued, and what is then written alone, by plain decoding."""

    prompt: tuple[int, ...]
    count: int
    params: SamplingParams
    written: tuple[int, ...]


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    made, plain = random.Random(0), make_engine("undrafted", model())
    beginnings = [[made.randrange(3, VOCAB) for _ in range(max(LENGTHS))] for _ in range(3)]
    kinds, texts = list(KINDS.values()), []
    for number, length in enumerate(made.sample(LENGTHS * 3, 3 * len(LENGTHS))):
        shared = made.choice((0, length // 2, length))  # tokens that it has in common with others
        prompt = made.choice(beginnings)[:shared] + [made.randrange(3, VOCAB) for _ in range(length - shared)]
        if number % 3 == 2 and length < max(LENGTHS) - MAX_NEW:  # the text before goes on, as a chat does
            prompt = [*texts[-1].prompt, *texts[-1].written, *prompt[-3:]][: max(LENGTHS)]
        count = made.choice((made.randrange(9, MAX_NEW + 1), BLOCK_SIZE + -len(prompt) % BLOCK_SIZE))
        params = replace(kinds[number % len(kinds)], seed=made.randrange(1000), speculate=made.random() < 0.8)
        sequence = make_sequence(prompt, min(count, MAX_NEW), params)
        texts.append(Text(tuple(prompt), sequence.max_new_tokens, params, tuple(alone(plain, sequence))))
    return texts


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest) -> tuple[str, Engine]:
    return request.param, make_engine(request.param, model())


def random_scheduler(engine: Engine, kind: str, made: random.Random) -> Scheduler:
    """Return a scheduler with limits, and a memory, as they may be."""
    rows = made.choice((2, 3, 5, 8)) if kind != "one row" else 1
    if kind == "dense":
        return dense_scheduler(engine, rows)
    longest = LONGEST_BLOCKS if engine.draft_vocabulary is None else 24
    few = kind == "few blocks"
    served = scheduler(
        engine,
        blocks=1 + longest + made.choice((0, 1, 6) if few else (20, 200)),
        host_blocks=60 if few else 0,
        max_batch_size=rows,
        max_num_tokens=made.choice((16, 40, 64, 150, 8192)),
        chunked=kind == "mixed prefill" or made.random() < 0.8,
        guaranteed_no_evict=not few and made.random() < 0.2,
        reuse=few or made.random() < 0.8,
    )
    served.overlap = kind == "mixed prefill" or made.random() < 0.5  # as on a GPU
    served.mixed_prefill = kind == "mixed prefill" and served.prefiller.can_mix
    return served


def run_schedule(engine: Engine, texts: list[Text], seed: str) -> Scheduler:
    """Serve some texts as a seed says, and compare each with what it is alone."""
    made, kind = random.Random(seed), seed.split(", ")[1]
    served, count = random_scheduler(engine, kind, made), made.randrange(6, 16)
    first = made.randrange(len(texts) - count)
    priorities = random.Random(seed)
    left = made.choice((made.choices(texts, k=count), texts[first : first + count][::-1]))  # taken from its end
    # How often one comes between two rounds.
    often = {"mixed prefill": 0.2, "few blocks": 0.4}.get(kind) or made.choice((0.1, 0.8))
    sent: list[tuple[Text, TokenSequence]] = []
    for _ in range(5000):
        while left and made.random() < often:
            text = left.pop()
            client, priority = f"client {made.randrange(3)}", priorities.choice((0, 0, 3, -1))
            sequence = TokenSequence(
                list(text.prompt), text.count, text.params, Sink(), client=client, priority=priority
            )
            sent.append((text, sequence))
            served.submit(sent[-1][1])
        if sent and made.random() < 0.03:
            served.cancel(made.choice(sent)[1])
        served.round()
        if served.idle and not left:
            break
    assert served.idle
    for text, sequence in sent:
        last = sequence.sink.deltas[-1]
        assert last.finish in {"stop", "length"} | ({"cancelled"} if sequence.cancelled else set()), last.error
        written = tuple(sequence.sink.tokens)
        expected = text.written[: len(written)] if last.finish == "cancelled" else text.written
        assert written == expected, f"seed {seed}, a prompt of {len(text.prompt)} tokens"
    return served


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(running_batch.MIN_POSITIONS, "cpu", POSITIONS)


KINDS_OF_SCHEDULES = ("few blocks", "mixed prefill", "dense", "one row")


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(100, 151), marks=pytest.mark.slow)], ids=str)
def test_texts_of_random_schedules_are_those_of_plain_decoding(engine, texts, seeds, monkeypatch):
    chunks = noted(monkeypatch, ChunkBuffers, "load")
    preempted = onboarded = 0
    for seed in seeds:
        kind = KINDS_OF_SCHEDULES[seed % len(KINDS_OF_SCHEDULES)]
        served = run_schedule(engine[1], texts, f"{engine[0]}, {kind}, {seed}")
        if kind != "dense":
            nothing_is_held(served)
            preempted += served.preempted
            managers = served.graphs.blocks, served.graphs.draft_blocks
            onboarded += sum(blocks.onboarded for blocks in managers if blocks is not None)
    assert preempted
    assert onboarded
    assert chunks or engine[1].draft_model is not None  # which must read each prompt, in a forward of its own
