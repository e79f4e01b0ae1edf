"""A step costs what the text that is there costs, whatever room was reserved for another sequence before."""

from dataclasses import replace

import pytest
import torch

from helpers.adapters import saved
from helpers.eagle import random_head
from helpers.generation import noted
from helpers.models import paged, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import change, make_sequence, random_sequences, run, run_as_alone, same_alone, scheduler
from redrafter import DraftTarget, Engine, PromptLookup
from redrafter.drafting.eagle import EagleProposer
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
ENGINES = {
    "drafter": lambda model: with_tree(model, tiny_drafter(), 3, 3),
    "EAGLE": lambda model: with_tree(model, random_head(max_position_embeddings=CONTEXT), 3, 3),
    "prompt lookup": lambda model: PromptLookup.from_pretrained(model, ngram=3, draft_len=4),
    "draft model": lambda model: DraftTarget.from_pretrained(model, tiny_model("gpt2", num_hidden_layers=1)),
}


def make(name: str = "drafter", context: int = CONTEXT) -> Engine:
    model = tiny_model("llama", max_position_embeddings=context)
    model.generation_config.eos_token_id = None
    return ENGINES[name](model)


@pytest.fixture
def taken(monkeypatch) -> list[CapturedStep]:
    """Every step that is taken from here on."""
    return noted(monkeypatch, RunningBatch, "prepare_step")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_after_a_long_sequence_was_cancelled_steps_see_as_few_positions_as_before(name, params, taken):
    served = scheduler(make(name), blocks=600)
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
        same_alone(served.engine, [sequence])


def test_room_that_is_there_already_is_not_allocated_again():
    served = scheduler(make())
    run(served, [make_sequence(TEXT, 12, GREEDY)])
    batch = served.batch
    tokens, captured = batch.state.tokens, dict(batch.captured_steps)
    batch.reserve(tokens.shape[1] - batch.overshoot)
    assert batch.state.tokens is tokens
    assert batch.captured_steps == captured != {}
    batch.reserve(tokens.shape[1] - batch.overshoot + 1)
    assert batch.state.tokens.shape[1] > tokens.shape[1]


@pytest.mark.parametrize("name", ENGINES)
def test_a_text_goes_on_from_window_to_window(name, taken):
    served = scheduler(make(name, 1024))
    kinds = ((39, GREEDY), (40, TOP_P), (5, PENALISED))
    sequences = [make_sequence(TEXT[:count] * 6, 40, params) for count, params in kinds]
    run(served, sequences, 2)
    assert {256, 512} <= {step.state.tokens.shape[1] for step in taken}
    same_alone(served.engine, sequences)
    ids = torch.tensor([sequences[0].request.prompt])
    expected = served.engine.model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    assert sequences[0].sink.tokens == expected.tolist()


def test_a_head_reads_the_positions_of_the_window_alone(monkeypatch):
    engine = make("EAGLE")
    served = scheduler(engine, blocks=600)
    read = noted(monkeypatch, EagleProposer, "read_context", lambda past, *_: 1 + past.bias.shape[-1])
    served.batch.reserve(CONTEXT)
    run(served, [make_sequence(TEXT, 12, GREEDY)])
    assert set(read) == {256}


def test_buffers_are_not_longer_than_the_longest_text():
    served = scheduler(make(context=1024))
    served.batch.reserve(1024)
    assert served.batch.state.tokens.shape[1] == -(-(1024 + served.batch.overshoot) // BLOCK_SIZE) * BLOCK_SIZE


def test_steps_hold_logits_only_where_a_sequence_asks_for_them():
    served = scheduler(make())
    run(served, [make_sequence(TEXT, 8, params) for params in (GREEDY, TOP_P)])
    assert not any(step.num_bytes for step in served.batch.captured_steps.values())
    asking = make_sequence(TEXT, 8, replace(GREEDY, logprobs=2))
    run(served, [asking])
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in asking.sink.deltas)
    assert any(step.num_bytes for step in served.batch.captured_steps.values())


def test_only_the_steps_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(running_batch, "MAX_CAPTURED_STEPS", 2)
    served = scheduler(make())
    run_as_alone(served, random_sequences(9), 1)
    assert len(served.batch.captured_steps) == 2


def test_steps_of_old_adapter_stacks_are_forgotten(tmp_path):
    engine = make()
    served = scheduler(engine)
    for name, layers in (("one", ["q_proj"]), ("two", ["o_proj"])):  # each changes layers that none did before
        engine.load_adapter(name, saved(tmp_path / name, target_modules=layers)[1])
        sequences = [make_sequence(TEXT, 8, GREEDY) for _ in range(2)]
        change(sequences[1], adapter=engine.target.adapters.hold(name))
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
    kind = tensors.kind([make_sequence(TEXT, 8, each) for each in params])
    assert (kind.greedy, bool(kind.edits), kind.sorted_rows, kind.guided) == expected


@pytest.mark.parametrize("few", [1, 2])
def test_where_few_rows_are_cut_the_others_write_what_they_do_alone(few, taken):
    others = [GREEDY, SamplingParams(seed=1), PENALISED, SamplingParams(temperature=0.7, seed=2, presence_penalty=0.4)]
    kinds = [*(replace(TOP_P, top_k=20 * row, seed=row) for row in range(few)), *(others * 4)[: 16 - few]]
    sequences = [make_sequence(TEXT[row:], 8 + row, params) for row, params in enumerate(kinds)]
    run_as_alone(scheduler(make(), blocks=400), sequences)
    last = (step.sampler.processors[-1:] for step in taken)  # the first steps have no rows
    assert any(type(processor).__name__ == "OfSomeRows" for processors in last for processor in processors)


def test_idle_batches_are_given_up_in_the_order_of_their_last_use(monkeypatch):
    engine = paged(make(), blocks=300)
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
