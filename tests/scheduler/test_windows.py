"""A step costs what the text that is there costs, whatever room was reserved for another sequence before."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from helpers.adapters import saved
from helpers.eagle import random_head
from helpers.models import paged, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import alone, make_sequence, nothing_is_held, random_sequences, run, scheduler
from redrafter import DraftTarget, Engine, PromptLookup
from redrafter.engine import idle_batches
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler import running_batch
from redrafter.scheduler.captured_step import CapturedStep
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.sampling_tensors import SamplingTensors

CONTEXT = 4096
GREEDY, TOP_P = SamplingParams(temperature=0), SamplingParams(top_p=0.8, seed=3)
PENALISED = SamplingParams(temperature=0, frequency_penalty=0.3, repetition_penalty=1.2)
TEXT = [3 + token * 5 % 90 for token in range(40)]


def recurrent(model: torch.nn.Module) -> Engine:
    return with_tree(model, tiny_drafter(), 3, 3)


def eagle(model: torch.nn.Module) -> Engine:
    return with_tree(model, random_head(max_position_embeddings=CONTEXT), 3, 3)


def lookup(model: torch.nn.Module) -> Engine:
    return PromptLookup.from_pretrained(model, ngram=3, draft_len=4)


def draft_model(model: torch.nn.Module) -> Engine:
    return DraftTarget.from_pretrained(model, tiny_model("gpt2", num_hidden_layers=1), draft_len=3)


ENGINES = pytest.mark.parametrize("make", [recurrent, eagle, lookup, draft_model])


def target(context: int = CONTEXT) -> torch.nn.Module:
    model = tiny_model("llama", max_position_embeddings=context)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def taken(monkeypatch) -> Iterator[list[CapturedStep]]:
    """Every step that is taken from here on."""
    taken, prepare = [], RunningBatch.prepare_step

    def prepare_step(batch: RunningBatch, *args: object) -> CapturedStep:
        taken.append(prepare(batch, *args))
        return taken[-1]

    monkeypatch.setattr(RunningBatch, "prepare_step", prepare_step)
    yield taken


@ENGINES
@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_after_a_long_sequence_was_cancelled_steps_see_as_few_positions_as_before(make, params, taken):
    engine = make(target())
    served = scheduler(engine, blocks=600)
    for reserved in (False, True):
        if reserved:
            long = make_sequence(TEXT, CONTEXT - 100, GREEDY)
            served.submit(long)
            served.round()
            served.cancel(long)
            run(served, [])
            assert served.batch.state.tokens.shape[1] >= CONTEXT
        taken.clear()
        sequence = make_sequence(TEXT, 12, params)
        run(served, [sequence])
        assert {(step.state.tokens.shape[1], step.cache.window) for step in taken} == {(256, 256)}
        assert sequence.sink.tokens == alone(engine, sequence)


@ENGINES
def test_a_text_goes_on_from_window_to_window(make, taken):
    engine = make(target(1024))
    served = scheduler(engine)
    sequences = [
        make_sequence(TEXT[: 5 * row] * 6, 150, params) for row, params in ((6, GREEDY), (8, TOP_P), (1, PENALISED))
    ]
    run(served, sequences, 2)
    assert {256, 512} <= {step.state.tokens.shape[1] for step in taken}
    for sequence in sequences:
        assert sequence.sink.tokens == alone(engine, sequence)
    greedy = sequences[0]
    ids = torch.tensor([greedy.prompt])
    expected = engine.model.generate(ids, max_new_tokens=150, do_sample=False)[0, ids.shape[1] :]
    assert greedy.sink.tokens == expected.tolist()
    nothing_is_held(served)


def test_a_head_reads_the_positions_of_the_window_alone(monkeypatch):
    engine = eagle(target())
    served, read, read_past = scheduler(engine, blocks=600), list[int](), type(engine.drafter).read_past

    def read_past_counted(self: object, keys: torch.Tensor, *rest: object) -> object:
        read.append(keys.shape[1])
        return read_past(self, keys, *rest)

    monkeypatch.setattr(type(engine.drafter), "read_past", read_past_counted)
    served.batch.reserve(CONTEXT)
    run(served, [make_sequence(TEXT, 12, GREEDY)])
    assert set(read) == {256}


def test_buffers_are_not_longer_than_the_longest_text():
    served = scheduler(recurrent(target(1024)))
    served.batch.reserve(1024)
    assert served.batch.state.tokens.shape[1] == -(-(1024 + served.batch.overshoot) // BLOCK_SIZE) * BLOCK_SIZE


def test_steps_hold_logits_only_where_a_sequence_asks_for_them():
    served = scheduler(recurrent(target()))
    run(served, [make_sequence(TEXT, 8, params) for params in (GREEDY, TOP_P)])
    assert not any(step.num_bytes for step in served.batch.captured_steps.values())
    asking = make_sequence(TEXT, 8, replace(GREEDY, logprobs=2))
    run(served, [asking])
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in asking.sink.deltas)
    assert any(step.num_bytes for step in served.batch.captured_steps.values())


def test_only_the_steps_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(running_batch, "MAX_CAPTURED_STEPS", 2)
    engine = recurrent(target())
    served, sequences = scheduler(engine), random_sequences(9)
    run(served, sequences, 1)
    assert len(served.batch.captured_steps) == 2
    for sequence in sequences:
        assert sequence.sink.tokens == alone(engine, sequence)


def test_steps_of_old_adapter_stacks_are_forgotten(tmp_path):
    engine = recurrent(target())
    served = scheduler(engine)
    for name, layers in (("one", ["q_proj"]), ("two", ["o_proj"])):  # each changes layers that none did before
        engine.load_adapter(name, saved(tmp_path / name, target_modules=layers)[1])
        sequences = [make_sequence(TEXT, 8, GREEDY) for _ in range(2)]
        sequences[1].adapter = engine.target.adapters.hold(name)
        for sequence in sequences:
            run(served, [sequence])
        assert {key.adapters for key in served.batch.captured_steps} == {0, engine.target.adapters.stacks.version}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ([GREEDY] * 16, (True, False, 0, False)),
        ([PENALISED] + [GREEDY] * 15, (True, True, 0, False)),
        ([PENALISED] + [SamplingParams()] * 15, (False, True, 0, False)),
        ([TOP_P] * 2 + [SamplingParams()] * 14, (False, False, 2, False)),
        ([TOP_P] * 3 + [SamplingParams()] * 13, (False, False, 16, False)),
        ([TOP_P, PENALISED, GREEDY], (False, True, 4, False)),
        ([replace(TOP_P, temperature=0)] * 3, (True, False, 0, False)),
    ],
)
def test_a_step_has_the_processors_that_its_rows_ask_for(params, expected):
    tensors = SamplingTensors(16, 97, torch.device("cpu"))
    assert tensors.kind([make_sequence(TEXT, 8, each) for each in params]) == expected


@pytest.mark.parametrize("few", [1, 2])
def test_where_few_rows_are_cut_the_others_write_what_they_do_alone(few, taken):
    engine = recurrent(target())
    others = [GREEDY, SamplingParams(seed=1), PENALISED, SamplingParams(temperature=0.7, seed=2, presence_penalty=0.4)]
    kinds = [*(replace(TOP_P, top_k=20 * row, seed=row) for row in range(few)), *(others * 4)[: 16 - few]]
    sequences = [make_sequence(TEXT[row:], 8 + row, params) for row, params in enumerate(kinds)]
    run(scheduler(engine, blocks=400), sequences)
    for sequence in sequences:
        assert sequence.sink.tokens == alone(engine, sequence)
    assert any(type(step.sampler.processors[-1]).__name__ == "OfSomeRows" for step in taken)


def test_idle_batches_are_given_up_in_the_order_of_their_last_use(monkeypatch):
    engine = paged(recurrent(target()), blocks=300)
    kinds = [1, 2, 4]  # rows whose settings are as large as the vocabulary: each number has a batch of its own

    def write(rows: int) -> list[int]:
        return engine.generate(torch.tensor([TEXT] * rows), max_new_tokens=8, logit_bias={4: 0.5})[0].tolist()

    written = [write(kind) for kind in kinds]
    before = engine.batches.idle
    most = before[0].num_bytes + before[2].num_bytes
    monkeypatch.setattr(idle_batches, "MAX_IDLE_BYTES", most)
    assert write(kinds[0]) == written[0]
    assert [before.index(batch) for batch in engine.batches.idle] == [2, 0]
    assert not before[1].num_bytes
    assert [write(kind) for kind in kinds] == written
    assert sum(batch.num_bytes for batch in engine.batches.idle) <= most
    engine.drop_graphs()
    assert not engine.batches.idle
