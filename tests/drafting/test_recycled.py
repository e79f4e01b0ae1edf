"""Recycled tokens: drafts without a drafter change no token, and no client sees what another one wrote."""

import json
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from helpers.command_line import fails
from helpers.generation import ON_BOTH_CACHES, same_as_model, same_undrafted
from helpers.models import VOCAB, bound, in_threads, tiny_model, uneven_batch, with_spread_weights
from helpers.scheduling import change, dense_scheduler, make_sequence, run, scheduler
from redrafter import ArgumentError, MismatchError, ReDrafter
from redrafter.checkpoints.drafters import new_table
from redrafter.cli import main
from redrafter.drafting import recycled
from redrafter.drafting.proposer import State
from redrafter.drafting.recycled import RecycledTokens
from redrafter.errors import CheckpointError
from redrafter.features import OWN_DRAFTS
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.sequence import TokenSequence
from redrafter.tree.beam_search import beam_search
from redrafter.tree.token_tree import chain

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6]])
LONG = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
GREEDY = SamplingParams(temperature=0)


class OnlyEven(LogitsProcessor):
    """Lets even tokens follow even ones only, as a rule of a user's own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        odd = torch.arange(scores.shape[-1]) % 2
        return scores.masked_fill(odd[None] != input_ids[:, -1:] % 2, -math.inf)


def recycling(model=None, **options) -> ReDrafter:
    """Return an engine with an empty table, whose steps draft whatever it costs, and whose text does not end.

    Without a model, it has one that is sure of its tokens.
    """
    model = model or with_spread_weights(tiny_model("llama"), 0.6)
    model.generation_config.eos_token_id = None
    engine = ReDrafter.from_pretrained(model, draft_from_text=False, **options)
    engine.pauses = False
    return engine


def table_of(engine: ReDrafter) -> RecycledTokens:
    assert isinstance(engine.drafter, RecycledTokens)
    return engine.drafter


def contents(table: RecycledTokens) -> dict[int, tuple[list[int], list[float]]]:
    """Return the tokens and logits of each key."""
    return {int(table.keys[at]): (table.ids[at].tolist(), table.logits[at].tolist()) for at in written(table)}


def written(table: RecycledTokens) -> list[int]:
    return (table.keys >= 0).nonzero().flatten().tolist()


def state_of(tokens: Tensor, length: Tensor | None = None) -> State:
    """Return the state of rows of which all tokens but the last, or `length` of them, are committed."""
    rows = len(tokens)
    length = torch.full((rows,), tokens.shape[1] - 1) if length is None else length
    return State(tokens=tokens, length=length, hidden=torch.zeros(rows, 1), active=torch.ones(rows, dtype=torch.bool))


@ON_BOTH_CACHES
def test_text_is_that_of_plain_decoding(on):
    engine = on(recycling())
    ids, mask = uneven_batch()
    same_as_model(engine, ids, mask, max_new_tokens=30)
    for how in ({"top_k": 0}, {"top_k": 7, "temperature": 0.7}, {"repetition_penalty": 1.3, "top_p": 0.9}):
        same_undrafted(engine, ids, mask, do_sample=True, seed=3, max_new_tokens=30, **how)
    same_undrafted(engine, ids, mask, max_new_tokens=20, do_sample=False, logits_processor=[OnlyEven()])
    assert engine.generate(ids, mask, **LONG).stats.accepted > 5


def test_the_text_of_a_grammar_is_that_of_plain_decoding():
    pytest.importorskip("llguidance")
    from helpers.chats import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    engine = recycling(tiny_model("llama", vocab_size=290))
    how = {"max_new_tokens": 24, "grammar": {"regex": "(ab|cd){4,9}"}, "tokenizer": tokenizer, "eos_token_id": 2}
    for draws in ({"do_sample": False}, {"do_sample": True, "seed": 1}, {"do_sample": False}):
        same_undrafted(engine, torch.tensor([[5, 6, 7]]), **how, **draws)


@pytest.mark.parametrize(("size", "length"), [(2, 1), (15, 2), (VOCAB, 1)])
def test_a_short_text_and_a_small_vocabulary_are_drafted_for(size, length):
    engine = recycling(tiny_model("llama", vocab_size=size, bos_token_id=None, eos_token_id=None, pad_token_id=None))
    prompt = torch.ones(1, length, dtype=torch.long)
    text = same_as_model(engine, prompt, torch.ones_like(prompt), max_new_tokens=16)
    assert torch.equal(engine.generate(prompt, torch.ones_like(prompt), max_new_tokens=16, do_sample=False), text)
    same_undrafted(engine, prompt, torch.ones_like(prompt), max_new_tokens=16, do_sample=True, seed=2)


def test_a_table_that_has_seen_a_text_drafts_more_of_it():
    engine = recycling()
    cold, warm = (engine.generate(PROMPT, **LONG).stats for _ in range(2))
    assert warm.accepted > cold.accepted + 5
    assert warm.steps < cold.steps - 5


def test_drafts_that_an_empty_table_makes_unlikely_are_not_verified_on_a_cpu():
    engine = recycling()
    stats = engine.generate(torch.tensor([[5]]), **LONG | {"max_new_tokens": 2}).stats
    assert (stats.steps, stats.drafted, stats.undrafted_steps) == (1, 0, 1), "nothing is known of any token"
    stats = engine.generate(torch.tensor([[5]]), **LONG).stats
    assert 0 < stats.drafted < 0.5 * stats.steps * (engine.proposer.nodes - 1), "most nodes were verified"


def test_more_beams_than_an_entry_has_tokens_are_refused():
    assert recycling(num_beams=16).proposer.beams == 16
    with pytest.raises(ArgumentError, match="num_beams=17 is more than the 16 tokens of an entry"):
        recycling(num_beams=17)


def test_what_only_a_drafter_takes_is_refused():
    with pytest.raises(ArgumentError, match="draft_quantization is for a drafter"):
        recycling(draft_quantization="fp8")
    with pytest.raises(ArgumentError, match="base_embedding"):
        recycling(base_embedding=True)


# Isolation.


def salted(salt: str | None) -> TokenSequence:
    sequence = make_sequence(PROMPT[0].tolist(), 40, GREEDY)
    change(sequence, cache_salt=salt)
    return sequence


def served(engine: ReDrafter, sequences: Sequence[TokenSequence], on_pages: bool) -> list[tuple[int, int]]:
    """Return the drafted and accepted tokens of sequences that are served one after the other."""
    batch = scheduler(engine, reuse=False) if on_pages else dense_scheduler(engine, 2)
    for sequence in sequences:
        run(batch, [sequence])
    return [(sequence.stats.drafted, sequence.stats.accepted) for sequence in sequences]


@pytest.mark.parametrize("on_pages", [True, False])
def test_drafts_of_a_text_with_a_salt_depend_on_no_other_texts(on_pages):
    first, again, other, of_all = served(recycling(), [salted(salt) for salt in ("a", "a", "b", None)], on_pages)
    assert first == other == of_all, "the number of drafts shows what others wrote"
    assert again[1] > first[1], "a client's own texts are recycled"


def test_a_text_with_a_salt_writes_no_entry_that_others_read():
    engine = recycling()
    served(engine, [salted(None)], True)
    shared = contents(table_of(engine))
    served(engine, [salted("a")], True)
    both = contents(table_of(engine))
    kept = {key: both[key] for key in shared if key in both}  # a few have lost their place in the table
    assert kept.items() <= shared.items()
    assert len(kept) > 0.95 * len(shared)
    assert len(both) > 1.95 * len(shared)
    numbers = {salt: salted(salt).inputs[OWN_DRAFTS] for salt in (None, "", "a", "b")}
    assert numbers[None] == 0
    assert len(set(numbers.values())) == 4


def test_texts_with_an_adapter_draft_what_that_adapter_has_written(tmp_path):
    pytest.importorskip("peft")
    from helpers.adapters import saved

    engine = recycling()
    for name, seed in (("one", 1), ("two", 2)):
        engine.load_adapter(name, saved(tmp_path / name, seed=seed)[1])
    counts, keys = {}, {}
    for name in ("one", None, "two", "one"):
        before = contents(table_of(engine))
        stats = engine.generate(PROMPT, adapter=name, **LONG).stats
        after = contents(table_of(engine))
        new = {key for key in after if before.get(key) != after[key]}
        assert all(not new & others for each, others in keys.items() if each != name), "another adapter's entry"
        keys[name] = keys.get(name, set()) | new
        counts.setdefault(name, []).append(stats.accepted)
    assert counts["one"][1] > counts["one"][0] + 5
    assert recycling().generate(PROMPT, **LONG).stats.accepted == counts[None][0]


# The table.


def empty(entries: int = 1 << 17) -> RecycledTokens:
    config = new_table(bound(tiny_model("llama"))).config
    config.entries = entries
    return RecycledTokens(config)


def check_entries(table: RecycledTokens) -> None:
    """Fail unless each entry has different tokens of the vocabulary."""
    ids = table.ids.sort(dim=-1).values
    assert bool((ids[:, 1:] > ids[:, :-1]).all()), "an entry has a token twice"
    assert bool(((ids >= 0) & (ids < VOCAB)).all())


def test_no_entry_has_a_token_twice_though_threads_write_at_once():
    table = empty(64)  # so that most writes replace one another

    def work(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            tokens = torch.randint(VOCAB, (3, 24), generator=generator)
            table.read_prompts(state_of(tokens), 23)
            nodes = torch.randint(VOCAB, (3, 5), generator=generator)
            table.read_step(state_of(tokens), chain(nodes), torch.randn(3, 5, VOCAB, generator=generator))
        return torch.zeros(1)

    in_threads(work, 4)
    check_entries(table)
    assert len(written(table)) == 64


class Guarded(Tensor):
    """A tensor of a table, which is read and written while its lock is held."""

    def __getitem__(self, index: object) -> Tensor:
        assert recycled._LOCK.locked(), "an entry is read that another thread may write"  # noqa: SLF001
        return super().__getitem__(index).as_subclass(Tensor)

    def __setitem__(self, index: object, value: Tensor) -> None:
        assert recycled._LOCK.locked(), "an entry is written that another thread may read"  # noqa: SLF001
        self.as_subclass(Tensor)[index] = value


def test_entries_are_read_and_written_under_one_lock():
    table = empty(64)
    table.keys, table.ids, table.logits = (x.as_subclass(Guarded) for x in (table.keys, table.ids, table.logits))
    tokens = torch.tensor([[4, 5, 6, 7]])
    table.read_prompts(state_of(tokens), 3)
    table.read_step(state_of(tokens), chain(torch.tensor([[7, 8]])), torch.randn(1, 2, VOCAB))
    table.read_tokens(torch.zeros(1, 1, dtype=torch.long), tokens, tokens)


def test_a_step_stores_the_likeliest_tokens_of_each_node_by_one_and_two_tokens():
    table, tokens = empty(), torch.tensor([[4, 5, 6]])
    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(0))
    table.read_step(state_of(tokens), chain(torch.tensor([[6, 7]])), logits)
    assert len(written(table)) == 4
    none = torch.zeros(1, 1, dtype=torch.long)
    for before, token, node in ((5, 6, 0), (6, 7, 1), (9, 7, 1)):
        ids, scores = table.read_tokens(none, torch.tensor([[before]]), torch.tensor([[token]]))
        best = ids[0, 0, scores[0, 0].topk(16).indices]
        assert best.tolist() == logits[0, node].topk(16).indices.tolist(), (before, token)
    ids, scores = table.read_tokens(none, torch.tensor([[5]]), torch.tensor([[7 + 1]]))
    assert scores[scores > -math.inf].unique().numel() == 1, "nothing is known of that token"


def test_a_token_has_an_entry_for_each_token_before_it():
    table, found = empty(), {}
    for before in (5, 9):
        logits = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(before))
        table.read_step(state_of(torch.tensor([[4, before, 6]])), chain(torch.tensor([[6]])), logits)
        found[before] = set(logits[0, 0].topk(16).indices.tolist())
    for before, expected in found.items():
        ids, _ = table.read_tokens(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[before]]), torch.tensor([[6]]))
        assert set(ids[0, 0, :16].tolist()) == expected


def test_a_prompt_stores_the_token_that_follows_and_nothing_past_its_end():
    table = empty()
    tokens = torch.tensor([[4, 5, 6, 9, 9], [7, 8, 30, 31, 32]])
    table.read_prompts(state_of(tokens, torch.tensor([2, 4])), 4)
    none = torch.zeros(1, 1, dtype=torch.long)
    for before, token, following in ((4, 5, 6), (30, 31, 32), (0, 8, 30)):
        ids, scores = table.read_tokens(none, torch.tensor([[before]]), torch.tensor([[token]]))
        assert ids[0, 0, scores[0, 0].argmax()] == following
    _, scores = table.read_tokens(none, torch.tensor([[5]]), torch.tensor([[6]]))
    assert scores[scores > -math.inf].unique().numel() == 1, "what follows the pending token is not known"


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_logits_that_are_not_finite_leave_entries_that_draft(bad):
    engine = recycling()
    table = table_of(engine)
    for share in (0.5, 0.98, 1.0):
        chosen = torch.rand(1, VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) < share
        logits = torch.randn(1, VOCAB, VOCAB).masked_fill(chosen, bad)
        table.read_step(state_of(PROMPT), chain(torch.arange(VOCAB)[None]), logits)
        check_entries(table)
        same_as_model(engine, PROMPT, max_new_tokens=12)
        same_undrafted(engine, PROMPT, do_sample=True, seed=1, max_new_tokens=12)


# A table that is kept.


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return a folder with a base and the table of an engine that has written a text."""
    folder = tmp_path_factory.mktemp("kept")
    engine = recycling()
    engine.generate(PROMPT, **LONG)
    engine.model.save_pretrained(folder / "base")
    engine.drafter.save_pretrained(folder / "table")
    return folder


def test_a_kept_table_drafts_from_the_first_token_on(kept):
    cold = recycling().generate(PROMPT, **LONG)
    engine = ReDrafter.from_pretrained(kept / "base", kept / "table", draft_from_text=False)
    engine.pauses = False
    warm = engine.generate(PROMPT, **LONG)
    assert torch.equal(warm.sequences, cold.sequences)
    assert warm.stats.accepted > cold.stats.accepted + 5
    same_as_model(engine, PROMPT, max_new_tokens=30)


def test_a_table_of_another_base_is_refused(kept):
    with pytest.raises(MismatchError, match="row norms"):
        ReDrafter.from_pretrained(tiny_model("qwen3"), kept / "table")


@pytest.mark.parametrize(("name", "value"), [("ids", VOCAB), ("ids", -1), ("ids", 0)])
def test_a_table_whose_entries_are_no_different_tokens_is_refused(kept, tmp_path, name, value):
    table = RecycledTokens.from_pretrained(kept / "table")
    getattr(table, name)[3, :2] = value
    table.save_pretrained(tmp_path / "wrong")
    with pytest.raises(CheckpointError, match="entries that are not different ids"):
        ReDrafter.from_pretrained(kept / "base", tmp_path / "wrong")


def test_info_describes_a_table_and_other_commands_refuse_it_by_name(folder, tmp_path, capsys):
    base, table = str(folder / "base"), str(tmp_path / "table")
    ReDrafter.from_pretrained(base).drafter.save_pretrained(table)
    assert main(["info", table, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafter"]["type"] == "table of recycled tokens"
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "ja " * 40}) + "\n")
    data, out = str(tmp_path / "data.jsonl"), str(tmp_path / "out")
    names = ["--base-model-checkpoint-dir", base, "--drafter-model-dir", table, "--output-dir", out]
    assert "table of recycled tokens" in fails(capsys, "convert", *names)
    for command in (["train", "--data", data, "--output", out], ["evaluate", "--prompts", data]):
        assert "table of recycled tokens" in fails(capsys, *command, "--model", base, "--drafter", table)


def test_each_engine_of_a_model_writes_its_own_table_and_undrafted_steps_write_none():
    first = recycling()
    target = first.target
    second = ReDrafter(target, new_table(target).placed(target))
    first.generate(PROMPT, speculate=False, **LONG)
    assert not written(table_of(first)), "undrafted decoding pays for no table"
    first.generate(PROMPT, **LONG)
    assert written(table_of(first))
    assert not written(table_of(second))
    first.forget_prefixes()
    assert not written(table_of(first)), "a measurement begins with what a first call has"


def test_the_tokens_of_another_key_are_not_read():
    table = empty(2)  # so that each key has the place of others
    other, own = (state_of(torch.tensor([[at, at + 1, at + 2, at + 3]])) for at in (40, 20))
    other = State(other.tokens, other.length, other.hidden, other.active, {OWN_DRAFTS: torch.tensor([7 << 30])})
    table.read_prompts(other, 3)
    none = torch.zeros(1, 1, dtype=torch.long)
    for token in range(VOCAB):
        ids, _ = table.read_tokens(none, none + token, none + token)
        assert ids.max() < table.config.candidates
    table.read_prompts(own, 3)
    assert all(token < table.config.candidates or token in range(20, 24) for token in table.ids.flatten().tolist())


def test_a_short_prompt_next_to_a_long_one_is_stored(monkeypatch):
    monkeypatch.setattr(recycled, "MOST_READ", 6)
    table, tokens = empty(), torch.arange(30)[None].repeat(2, 1)
    table.read_prompts(state_of(tokens, torch.tensor([29, 4])), 29)
    short = empty()
    short.read_prompts(state_of(tokens[1:, :5]), 4)
    assert set(contents(short)) <= set(contents(table))
    assert len(written(table)) > len(written(short)) > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_share_the_nodes_of_a_search_that_found_few_likely_ones(beams):
    scores = torch.zeros(4, 1, VOCAB)
    sizes = {"beams": beams, "depth": 3, "nodes": 4, "shared": 6, "least": math.log(0.9)}

    def expand(step: int, tokens: Tensor, sources: Tensor) -> Tensor:
        return scores.expand(-1, tokens.shape[1], -1)

    assert beam_search(torch.arange(4), expand, **sizes).tokens.shape[1] == 1
    scores[0, :, 5] = 20.0
    tree = beam_search(torch.arange(4), expand, **sizes)
    assert tree.tokens.shape[1] == 4
    assert tree.total == 6
