"""Models with recurrent states continue from stored prefixes: tokens are skipped, and the text stays the same."""

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch

from helpers.features import make_engine
from helpers.models import tiny_model
from helpers.recurrent import generated_alone, recurrent_model
from helpers.scheduling import (
    KINDS,
    launch_ahead,
    make_sequence,
    run,
    run_as_alone,
    same_alone,
    scheduler,
)
from redrafter import DraftTarget, Engine
from redrafter.engine.changes import Sleep, UpdateWeights, Wake
from redrafter.features import RECURRENT_STATES
from redrafter.model.recurrent_layers import PromptStates
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.engine_change import EngineChange
from redrafter.scheduler.sequence import TokenSequence

GREEDY = SamplingParams(temperature=0)
SYSTEM = [3 + 7 * n % 90 for n in range(82)]  # five blocks and two tokens
FAST = ("lfm2", "draft model's tree"), ("mamba2", "undrafted"), ("qwen3_next", "draft model's tree")
SLOW = (
    *((model, "draft model's tree") for model in ("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "mamba2")),
    *(("lfm2", name) for name in ("drafter", "EAGLE", "DFlash", "prompt lookup")),
)
PAIRS = pytest.mark.parametrize(
    ("model", "name"), [*FAST, *(pytest.param(*each, marks=pytest.mark.variant) for each in SLOW)]
)


def asked(number: int, params: SamplingParams = GREEDY, new: int = 10) -> TokenSequence:
    """Return a sequence of the system prompt and a question of its own."""
    return make_sequence([*SYSTEM, 5 + number, 11, *range(20 + number, 34)], new, params)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch):
    """Count the tokens of prompts that the target's layers with states read."""
    read, finish = [], PromptStates.finish

    def finished(self: PromptStates) -> None:
        read.extend(piece.count for piece in self._pieces)
        finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(PromptStates, "finish", finished)
        yield read


@PAIRS
def test_prompts_continue_from_what_earlier_ones_have_stored(model, name, monkeypatch):
    engine = make_engine(name, recurrent_model(model))
    served, sequences = scheduler(engine), [asked(number) for number in range(2)]
    for sequence in sequences:
        run(served, [sequence])  # the first one stores the system prompt, the second one finds where it ends
    sequences += [asked(2 + number, kind) for number, kind in enumerate(KINDS.values())]
    with counted(monkeypatch) as read:
        run(served, sequences[2:])  # side by side
    assert [sequence.reused for sequence in sequences] == [0, 0] + [80] * len(KINDS)
    models = 1 + (served.memory.draft_store is not None and RECURRENT_STATES in engine.draft_model.features)
    assert sum(read) == models * sum(len(sequence.request.prompt) - 80 for sequence in sequences[2:])
    same_alone(engine, sequences)
    prompt = torch.tensor([sequences[2].request.prompt])
    [whole] = generated_alone(engine.model, prompt, torch.ones_like(prompt), 10)
    assert sequences[2].tokens == whole.tolist()


def test_drafts_after_a_stored_prefix_are_as_good():
    engine = make_engine("draft model", recurrent_model("lfm2"))  # the model drafts for itself
    served, sequences = scheduler(engine), [asked(1, new=25) for _ in range(2)]
    for sequence in sequences:
        run(served, [sequence])
    assert [sequence.reused for sequence in sequences] == [0, 96]
    assert sequences[0].stats.accepted == sequences[1].stats.accepted == 18


def test_a_draft_model_alone_may_keep_states():
    model = tiny_model("llama", max_position_embeddings=384)
    model.generation_config.eos_token_id = None
    engine = DraftTarget(Target(model), Target(recurrent_model("lfm2")), draft_len=3)
    served, sequences = scheduler(engine), [asked(number) for number in (0, 1, 2, 2)]
    run(served, sequences[:1])
    run(served, sequences[1:2])
    run(served, sequences[2:])
    assert [sequence.reused for sequence in sequences] == [0, 0, 80, 80]
    same_alone(engine, sequences)
    rows = served.memory.draft_store.states.position[1:4]
    assert all(rows), "each row has states of its own"


@pytest.mark.parametrize(("order", "prefix_states"), [("ahead", 1), ("in turn", 2)])
def test_few_states_and_few_blocks_change_no_token(order, prefix_states, monkeypatch):
    if order == "ahead":
        launch_ahead(monkeypatch)
    engine = make_engine("draft model's tree", recurrent_model("lfm2"), max_prefix_states=prefix_states)
    served = scheduler(engine, blocks=18, max_num_tokens=60, max_batch_size=4)
    sequences = [asked(number % 4, kind, new=24) for number, kind in enumerate([*KINDS.values()] * 2)]
    run_as_alone(served, sequences, apart=1)
    assert served.running_set.preempted
    assert any(sequence.reused for sequence in sequences)
    assert len(served.memory.blocks.states) <= prefix_states


def test_a_sequence_that_was_preempted_continues_at_the_end_of_its_prompt():
    engine = make_engine("undrafted", recurrent_model("lfm2"))
    served, sequence = scheduler(engine), make_sequence(SYSTEM, 50, GREEDY)
    served.submit(sequence)
    while len(sequence.tokens) < 82 + 40:
        served.round()
    served.change(Nothing())
    run(served, [make_sequence([5], 2, GREEDY)])
    assert sequence.reused == 80
    same_alone(engine, [sequence])


class Nothing(EngineChange):
    """A change after which what is stored is as good as before."""

    def apply(self) -> None:
        pass


class Everything(EngineChange):
    """A change after which nothing that is stored is any good."""

    def __init__(self, engine: Engine):
        self._target = engine.target

    def apply(self) -> None:
        self._target.shared.written += 1


def test_new_weights_and_sleep_forget_states():
    engine = make_engine("undrafted", deepcopy(recurrent_model("lfm2")))
    served = scheduler(engine)
    weights = {name: weight * 1.1 for name, weight in engine.model.state_dict().items()}
    states = served.memory.store.states.tensors.values()
    for changes in ([], [UpdateWeights(engine, weights)], [Sleep(engine), Wake(engine)]):
        for change in changes:
            served.change(change)
            if engine.asleep:
                assert not sum(x.untyped_storage().nbytes() for x in states)
        assert len(served.memory.blocks.states) == 0
        for reused in (0, 96):
            sequence = asked(1)
            run_as_alone(served, [sequence])
            assert sequence.reused == reused


@pytest.mark.parametrize(
    ("model", "options", "states"),
    [("lfm2", {}, 64), ("lfm2", {"max_prefix_states": 3}, 3), ("lfm2", {"max_prefix_states": 0}, 0), ("jamba", {}, 0)],
    ids=str,
)
def test_as_many_states_are_kept_as_the_options_say_and_none_where_prompts_continue_slowly(model, options, states):
    engine: Engine = make_engine("undrafted", recurrent_model(model), kv_cache_free_gpu_memory_fraction=0.01, **options)
    assert engine.make_memory(rows=1, reuse=False).store.prefix_states == 0
    memory = engine.make_memory(rows=1)
    assert memory.store.prefix_states == states
    assert memory.store.rows == 1
    served = scheduler(engine)
    served = type(served)(engine, memory, served.limits)
    sequences = [asked(1, new=3) for _ in range(2)]
    for sequence in sequences:
        run_as_alone(served, [sequence])
    assert [sequence.reused for sequence in sequences] == [0, 96 if states else 0]
