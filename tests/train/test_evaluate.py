"""Evaluation: a replay counts what decoding reports, and the report adds up."""

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers.chats import write
from helpers.command_line import fails
from helpers.dflash import DFLASH_FORMS, random_block_drafter
from helpers.eagle import EAGLE_FORMS, random_head
from helpers.models import DRAFTER_ALONE, HIDDEN, VOCAB, tiny_drafter, tiny_model
from helpers.training import learn_circle, round_circle
from redrafter import RecurrentDrafter, ReDrafter, boxed_pair
from redrafter.app.loading import Pair
from redrafter.checkpoints.tokenizers import end_tokens, load_tokenizer
from redrafter.cli import main
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.drafting.proposer import State
from redrafter.formats.model_card import replace_acceptance
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.train.config import TrainConfig
from redrafter.train.evaluate import replay as replay_module
from redrafter.train.evaluate import texts as texts_module
from redrafter.train.evaluate.command import evaluate
from redrafter.train.evaluate.options import EvaluateOptions, Search
from redrafter.train.evaluate.replay import Positions, ReplayStats, ValidationTexts, count_accepted, replay
from redrafter.train.evaluate.texts import PromptSource, Texts, repeated_share, write_texts
from redrafter.train.loop import train
from redrafter.train.teacher import Teacher
from redrafter.tree.sizes import TreeShape

SHAPES = [
    *(TreeShape(3, depth, nodes) for depth, nodes in ((4, 13), (4, 6), (4, 99), (2, 7), (2, 4), (1, 1))),
    *(TreeShape(1, depth, nodes) for depth, nodes in ((4, 5), (4, 3), (2, 3))),
    TreeShape(5, 3, 9),
]


OTHERS = {
    "EAGLE": partial(random_head, **EAGLE_FORMS["speculators"]),
    **{form: partial(random_block_drafter, **DFLASH_FORMS[form]) for form in ("speculators'", "recurrent", "DFlash2")},
}


def random_prompts(lengths: tuple[int, ...] = (1, 9, 4, 17, 6)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def patterned() -> tuple[PreTrainedModel, RecurrentDrafter]:
    """Train a base to go round a circle of ids, one of which ends its texts, and its drafter."""
    model, drafter = tiny_model("llama", initializer_range=0.05), tiny_drafter()
    circle, mask = learn_circle(model, 60), torch.ones(16, 24, dtype=torch.bool)
    config = TrainConfig(draft_len=3, lr=1e-2, warmup=0, cpu=True)
    train(model, drafter, [(round_circle(circle, 16, step), mask) for step in range(25)], config, log=lambda _: None)
    model.generation_config.eos_token_id = [2, int(circle[7])]
    return model, drafter


def random_pair(draft_vocab: int | None = None, **changes: object) -> tuple[PreTrainedModel, RecurrentDrafter]:
    """Make a pair with so many ids that end texts that some texts do end."""
    model, drafter = tiny_model("llama"), tiny_drafter(draft_vocab_size=draft_vocab, **changes)
    model.generation_config.eos_token_id = [2, 11, 12, 13, 14]
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(
            torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort()[0]
        )
    return model, drafter


# The walk


@pytest.mark.parametrize(
    "pair, temperature",
    [("patterned", 0.6), *product(("patterned", "random", "reduced", "layered", "context", *OTHERS), (0.0, 1.0))],
)
def test_a_replay_counts_what_generate_reports(request, pair, temperature, monkeypatch):
    """Compare text by text, on unequal prompts decoded as one batch, some of which end early."""
    monkeypatch.setattr(replay_module, "MAX_BATCH_TEXTS", 2)
    monkeypatch.setattr(replay_module, "MAX_BATCH_POSITIONS", 7)
    layered = {"target_layers": [0, 1], "recurrence": "gated", "head_rank": 16}
    context = {"context_window": 6, "context_head_dim": 8}
    changes = {"reduced": {"draft_vocab": 40}, "layered": layered, "context": layered | context}.get(pair, {})
    model, drafter = request.getfixturevalue("patterned") if pair == "patterned" else random_pair(**changes)
    if pair in OTHERS:
        drafter = OTHERS[pair]()
    elif drafter.context is not None:
        torch.nn.init.normal_(drafter.context.out.weight, std=3)  # or nothing that is read would show
    target, prompts = Target(model), random_prompts()
    texts = write_texts(target, prompts, 23, temperature, seed=5, batch_size=2)
    assert 0 < sum(texts.ended) < len(prompts) or temperature == 0
    found = replay(drafter, target, texts, SHAPES)
    ids = torch.tensor([[0] * (17 - len(prompt)) + prompt for prompt in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": 5} if temperature else {}
    for shape, replayed in zip(SHAPES, found, strict=True):
        engine = ReDrafter(target, drafter, shape, options=DRAFTER_ALONE)
        arguments = {"do_sample": False, "max_new_tokens": 23, "return_dict_in_generate": True} | sampling
        out = engine.generate(ids, (ids > 0).long(), **arguments)
        for row, (text, mine, stats) in enumerate(zip(texts.continuations, replayed, out.stats.rows, strict=True)):
            assert out.sequences[row, 17 : 17 + len(text)].tolist() == text
            assert mine.tokens_per_step == stats.tokens_per_step
            for name in ("steps", "drafted", "accepted", "emitted", "accepted_by_depth"):
                assert getattr(mine, name) == getattr(stats, name), (str(shape), row, name)
    assert sum(each.steps for each in found[0]) > 5
    if pair == "patterned" or temperature == 1:
        assert sum(each.accepted for each in found[0]) > 5


def replay_chain(drafter: RecurrentDrafter, model: PreTrainedModel, *texts: list[int]) -> ReplayStats:
    """Replay a chain of three drafts along texts with prompts of one token, and add up the statistics."""
    shape, given = TreeShape(1, 3, 4), Texts(list(texts), [1] * len(texts), [False] * len(texts))
    return ReplayStats.sum(shape, replay(drafter, Target(model), given, [shape])[0])


def test_a_replay_ends_with_the_text(monkeypatch):
    """A drafter proposes 0 forever on texts of zeros.

    Drafts past the end of a text must count neither as accepted nor as rejected.
    """
    model, drafter = tiny_model("llama"), tiny_drafter()
    zero = torch.zeros(VOCAB).index_fill(0, torch.tensor(0), 1.0)
    monkeypatch.setattr(drafter, "step", lambda e, s, h, *_: (zero.expand(*e.shape[:-1], VOCAB), e))
    found = replay_chain(drafter, model, [5] + [0] * 7, [5, 0, 0], [5, 0])
    # The first: three drafts and one more, then the two that are left. The second: the one that is left.
    assert (found.steps, found.emitted, found.accepted_by_depth) == (3, 7, [3, 2, 1])
    assert found.tried == [3, 2, 1]
    assert found.acceptance == [1, 1, 1]
    missing = replay_chain(drafter, model, [5, 0, 7, 0, 0, 0])
    # Nothing of the first step, two of the second; the third draft had no room.
    assert missing.tried == [2, 1, 1]
    assert missing.accepted_by_depth == [1, 1, 1]
    assert ReplayStats.sum(TreeShape(1, 3, 4)).acceptance == [None] * 3


def positions(pending: Tensor, hidden: Tensor, length: int) -> Positions:
    """Make positions whose text is `length` times the pending token `[A, 1]`."""
    zero = torch.zeros(len(pending), dtype=torch.long)
    sampler = Sampler(None, (), torch.ones(len(zero)), zero, zero, torch.arange(VOCAB))
    return Positions(State(pending.repeat(1, length), zero, hidden, zero == 0), sampler, None, None)


def test_final_beams_keep_the_prefixes_of_the_beams_that_survive():
    """Compare with paths written out one by one, for the deepest search and a shallower one."""
    model, drafter = random_pair()
    target, rows, generator = Target(model), 200, torch.Generator().manual_seed(3)
    pending = torch.randint(3, VOCAB, (rows, 1), generator=generator)
    at = positions(pending, torch.randn(rows, HIDDEN, generator=generator), 7)
    deepest = RecurrentProposer(drafter, target, 4, 5, 21).propose(at.state, at.sampler, None, None, None)
    # The text follows some node of the whole lattice, so that all depths are reached, and then goes on otherwise.
    for row in range(rows):
        path = _path(deepest, row, int(torch.randint(1, 21, (), generator=generator)))
        at.state.tokens[row, 1:] = torch.tensor(path + [-1] * (6 - len(path)))
    shapes = [TreeShape(4, 5, None), TreeShape(4, 3, None), TreeShape(4, 5, 21)]
    accepted, drafted = count_accepted(drafter, target, at, shapes)
    for column, depth in ((0, 5), (1, 3)):
        for row in range(rows):
            text = at.state.tokens[row, 1:].tolist()
            beams = [_path(deepest, row, 1 + 4 * (depth - 1) + beam) for beam in range(4)]
            prefixes = {tuple(beam[:length]) for beam in beams for length in range(1, depth + 1)}
            longest = max((len(one) for one in prefixes if text[: len(one)] == list(one)), default=0)
            assert (accepted[row, column], drafted[row, column]) == (longest, len(prefixes))
    assert (accepted[:, 0] < accepted[:, 2]).any()
    assert (drafted[:, 0] < 20).any()
    assert accepted[:, 0].max() == 5


def _path(tree, row: int, node: int) -> list[int]:
    tokens = []
    while node:
        tokens.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tokens


def test_one_forward_of_the_base_and_one_search_of_a_width_serve_all_shapes(patterned, monkeypatch):
    model, drafter = patterned
    target, calls = Target(model), []
    texts = write_texts(target, random_prompts(), 12)
    for owner, name in ((Teacher, "read_batch"), (drafter, "step")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, n=name, of=real: calls.append(n) or of(*args))
    replay(
        drafter,
        target,
        texts,
        [TreeShape(3, 4, nodes) for nodes in (13, 7, 2)] + [TreeShape(3, 2, 5), TreeShape(3, 4, None)],
    )
    assert calls == ["read_batch"] + ["step"] * 4


def test_memory_bounds_what_is_done_at_once_and_not_the_result(monkeypatch):
    model, drafter = random_pair()
    target, sizes, seen, read = Target(model), [], [], Teacher.read_batch
    texts = write_texts(target, random_prompts(), 20, 1.0)
    given = Texts(random_prompts((6, 26, 7, 20, 19)), [2] * 5, [False] * 5)
    whole, other = replay(drafter, target, texts, SHAPES), replay(drafter, target, given, SHAPES[-1:])

    def sized(drafter, target, at, shapes):
        sizes.append(len(at.state.length))
        return count_accepted(drafter, target, at, shapes)

    monkeypatch.setattr(replay_module, "count_accepted", sized)
    monkeypatch.setattr(replay_module, "MAX_BATCH_BYTES", VOCAB * (16 * 5 + 32 * 4) * 3)  # positions of the drafter
    assert replay(drafter, target, texts, SHAPES) == whole
    assert max(sizes) == 3
    monkeypatch.setattr(replay_module, "MAX_BATCH_BYTES", VOCAB * 4 * 50)  # texts of the base
    monkeypatch.setattr(
        Teacher, "read_batch", lambda self, tokens: seen.append(tuple(tokens.shape)) or read(self, tokens)
    )
    assert replay(drafter, target, given, SHAPES[-1:]) == other
    assert seen == [(2, 7), (2, 20), (1, 26)]


def test_a_chain_is_cut_at_its_end_even_where_rounding_scores_a_child_above_its_parent(monkeypatch):
    """A drafter is almost sure of id 7, then of id 8; the base draws 7 and then another id."""
    model, drafter = random_pair()
    rows, depth = 50, []

    def step(embedding, state, hidden, read, embedded):
        depth.append(7 if state is None else 8)
        peak = torch.linspace(5, 40, rows)[:, None, None].expand(rows, 1, VOCAB)
        sure = one_hot(torch.tensor(depth[-1]), VOCAB) * (peak + 8.1)
        return sure if state is None else sure * 9, embedding

    monkeypatch.setattr(drafter, "step", step)
    at = positions(torch.full((rows, 1), 5), torch.zeros(rows, HIDDEN), 4)
    at.state.tokens[:, 1:] = torch.tensor([7, 9, 9])
    accepted, drafted = count_accepted(drafter, Target(model), at, [TreeShape(1, 2, 2)])
    assert accepted.flatten().tolist() == drafted.flatten().tolist() == [1] * rows


def test_validation_texts_are_written_once_and_measure_any_drafter(patterned, monkeypatch):
    model, drafter = patterned
    shape = TreeShape(3, 4, 13)
    mute = ValidationTexts(Target(model), random_prompts(), 12, end_ids=range(VOCAB))
    assert mute.count == mute.measure(drafter, shape).steps == 0
    validation_texts = ValidationTexts(Target(model), random_prompts(), 12)
    assert validation_texts.texts == write_texts(Target(model), random_prompts(), 12)
    monkeypatch.setattr(texts_module, "Engine", None)  # from here on nothing may be written
    first = validation_texts.measure(drafter.train(), shape)
    assert drafter.training
    assert validation_texts.measure(drafter.eval(), shape) == first
    assert first == ReplayStats.sum(shape, replay(drafter, validation_texts.target, validation_texts.texts, [shape])[0])
    assert validation_texts.count == sum(len(own) > 1 for own in validation_texts.texts.continuations) > 0
    assert validation_texts.measure(tiny_drafter(), shape).accepted < first.accepted


# Texts


def test_texts_say_how_they_ended_and_do_not_depend_on_their_batch():
    model, _ = random_pair()
    target, prompts = Target(model), random_prompts()
    alone, together = (write_texts(target, prompts, 20, 1.0, seed=9, batch_size=rows) for rows in (1, 5))
    assert alone == together
    assert alone.prompt_lengths == [1, 9, 4, 17, 6]
    assert alone.seeds == [9, 10, 11, 12, 13]
    assert [text[:start] for text, start in zip(alone.tokens, alone.prompt_lengths, strict=True)] == prompts
    ends = {2, 11, 12, 13, 14}
    assert alone.ended == [own[-1] in ends for own in alone.continuations]
    assert any(alone.ended)
    assert not any(set(own[:-1]) & ends for own in alone.continuations)
    said = []
    other = write_texts(target, prompts, 20, 1.0, seed=9, end_ids=[3], batch_size=2, report=said.append)
    assert other.ended == [own[-1] == 3 for own in other.continuations]
    assert said == [0, 2, 4, 5]
    assert all(len(own) == 20 or own[-1] == 3 for own in other.continuations)


def test_only_a_temperature_stands_between_model_and_text():
    model, _ = random_pair()
    plain = [write_texts(Target(model), random_prompts(), 16, temperature) for temperature in (0.0, 1.0)]
    model.generation_config.update(repetition_penalty=3.0, top_k=1, top_p=0.1, temperature=0.3)
    assert [write_texts(Target(model), random_prompts(), 16, temperature) for temperature in (0.0, 1.0)] == plain


def test_repetition_is_of_runs_that_occurred_before_in_the_same_text():
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4, 5], [7]], 4) == pytest.approx(1 / 7)
    assert repeated_share([[5] * 10], 4) == pytest.approx(6 / 7)
    assert repeated_share([[1, 2, 3]], 4) is None


def test_a_tokenizer_may_know_another_end_than_its_model():
    model, _ = random_pair()
    tokenizer = load_tokenizer(boxed_pair())
    tokenizer.eos_token = "<|pad|>"
    assert end_tokens(model) == [2, 11, 12, 13, 14]
    assert end_tokens(model, tokenizer) == [0, 2, 11, 12, 13, 14]
    model.generation_config.eos_token_id = None
    assert end_tokens(model) == []


# Prompts


QUESTION, ANSWER = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}


def test_prompts_come_by_category_from_rows_of_every_kind(tmp_path):
    tokenizer = load_tokenizer(boxed_pair())
    rows = [
        {"text": "to be or not to be, that is the question", "source": "plays"},
        {"messages": [QUESTION, ANSWER, QUESTION], "category": "chat"},
        {"turns": ["why?", "and then?"], "category": "chat"},
        {"messages": [QUESTION], "split": "test"},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 1]},
        {"text": "left out", "split": "train", "source": "train"},
    ]
    lines = tmp_path / "lines.txt"
    lines.write_text("a line\n\nanother line\n" + "long " * 200 + "\n")
    both = [write(tmp_path / "rows.jsonl", rows), str(lines)]
    found = PromptSource(both, tokenizer).by_category(100)
    chat = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    assert {name: sorted(map(tokenizer.decode, some)) for name, some in found.items() if name != "plays"} == {
        "chat": [chat, chat],
        "rows": sorted([chat, tokenizer.decode([5, 6, 7])]),
        "lines": sorted(tokenizer.decode(tokenizer(line).input_ids) for line in ("a line", "another line")),
    }
    [play] = found["plays"]
    whole = tokenizer(rows[0]["text"]).input_ids
    assert play == whole
    for share, most, count in ((0.5, None, len(whole) // 2), (1.0, 3, 3), (0.5, 64, len(whole) // 2)):
        cut = PromptSource(both[:1], tokenizer, share=share, most=most).by_category(100)
        assert cut["plays"] == [whole[:count]]
        assert {name: some for name, some in cut.items() if name != "plays"} == {
            name: some for name, some in found.items() if name in ("chat", "rows")
        }
    few = PromptSource(both, tokenizer, 1).by_category(100)
    assert {name: len(some) for name, some in few.items()} == dict.fromkeys(("plays", "chat", "rows", "lines"), 1)
    shipped = PromptSource([], tokenizer).by_category(500)
    assert set(shipped) == {"classic_books", "peps", "eips"}
    assert sum(map(len, shipped.values())) == 16
    first, again, *others = (PromptSource([], tokenizer, 2, seed).by_category(500) for seed in (0, 0, 1, 2, 3))
    assert first == again
    assert any(one != first for one in others)


# The command


@pytest.fixture(scope="module")
def boxed() -> tuple[ReDrafter, PreTrainedTokenizerBase]:
    return ReDrafter.from_pretrained(boxed_pair()), load_tokenizer(boxed_pair())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, dict, str]:
    """Run the command. Returns the folder that it wrote to, its document and what it printed."""
    folder = tmp_path_factory.mktemp("evaluate")
    rows = [{"text": f"{n} men went to mow, went to mow a meadow", "source": f"kind {n % 2}"} for n in range(3)]
    write(folder / "rows.jsonl", rows)
    words = "--prompts rows.jsonl --new-tokens 24 --shapes 3x2,1x2 --node_budgets 5,2,99 --seed 4 --batch-size 2"
    more = "--json out.json --plot out.png --device cpu"
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        assert main(["evaluate", *words.split(), *more.split()]) == 0
    assert "temperature 1: 3 of 3 texts" in err.getvalue()
    return folder, json.loads((folder / "out.json").read_text()), out.getvalue()


def test_the_document_is_complete(measured):
    folder, document, _ = measured
    assert sorted(path.name for path in folder.iterdir()) == ["out.json", "out.png", "rows.jsonl"]
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert document["command"].startswith("redrafter evaluate --prompts rows.jsonl --new-tokens 24")
    assert document["versions"].keys() >= {"redrafter", "torch", "transformers", "python"}
    facts = {"model": "boxed", "drafter": "drafter", "dtype": "float32", "device": "cpu", "seed": 4, "new_tokens": 24}
    assert {name: document[name] for name in facts} == facts
    assert document["batch_size"] == 2
    assert document["prompts"] == {
        "files": ["rows.jsonl"],
        "categories": {"kind 0": 2, "kind 1": 1},
        "share_of_a_text": 1.0,
        "most_tokens_of_a_text": None,
        "lengths": [],
        "lengths_left_out": [],
        "longest": None,
    }
    assert [one["temperature"] for one in document["temperatures"]] == [0, 1]
    names = ["3x2, 5 nodes", "3x2, 2 nodes", "3x2, 7 nodes", "3x2, final beams", "1x2, 3 nodes", "1x2, 2 nodes"]
    for one in document["temperatures"]:
        assert [tree["tree"] for tree in one["trees"]] == names
        assert one["prompt_length"] is None
        assert one["all_texts"]["texts"] == 3
        assert one["all_texts"]["tokens"] <= 72


def test_categories_add_up(measured):
    document = measured[1]
    for one in document["temperatures"]:
        texts = one["texts"].values()
        assert {name: each["texts"] for name, each in one["texts"].items()} == document["prompts"]["categories"]
        assert sum(each["tokens"] for each in texts) == one["all_texts"]["tokens"]
        ended = sum(each["ended"] * each["texts"] for each in texts) / 3
        assert one["all_texts"]["ended"] == pytest.approx(ended)
        for tree in one["trees"]:
            parts, total, mean = list(tree["categories"].values()), tree["all_steps"], tree["mean_of_categories"]
            for name in ("steps", "tokens"):
                assert sum(part[name] for part in parts) == total[name] > 0
            for name in ("accepted_by_depth", "tried_by_depth"):
                assert [sum(each) for each in zip(*(part[name] for part in parts), strict=True)] == total[name]
            # The prefill draws a text's first token; steps draw the others.
            assert total["tokens"] == one["all_texts"]["tokens"] - 3
            assert total["tokens_per_step"] == total["tokens"] / total["steps"]
            assert mean["tokens_per_step"] == pytest.approx(sum(part["tokens_per_step"] for part in parts) / 2)
            assert total["acceptance"][0] == total["accepted_by_depth"][0] / total["tried_by_depth"][0]


@pytest.mark.filterwarnings("ignore:draft_len_per_beam")
def test_one_run_counts_trees_deeper_than_the_drafter_was_trained_for(boxed):
    """The boxed drafter was trained for five drafts; where its base repeats itself, ten are right."""
    engine, tokenizer = boxed
    assert engine.drafter.config.trained_draft_len == 5
    searches = tuple(Search(*sizes) for sizes in ((5, 5), (5, 7), (4, 8), (3, 10), (5, 10)))
    options = EvaluateOptions(shapes=searches, node_budgets=(26,), num_prompts=1, new_tokens=32, temperatures=(0,))
    [result] = evaluate(Pair("base", "drafter", "its drafter", tokenizer, engine), options)["temperatures"]
    trees = [tree for tree in result["trees"] if tree["nodes"] == 26]
    assert [(tree["beams"], tree["depth"]) for tree in trees] == list(searches)
    ids = torch.tensor(PromptSource([], tokenizer, 1).by_category(900)["eips"])
    for tree in trees:
        shape = TreeShape(tree["beams"], tree["depth"], 26)
        own = ReDrafter(engine.target, engine.drafter, shape, options=DRAFTER_ALONE)
        stats = own.generate(ids, do_sample=False, max_new_tokens=32, return_dict_in_generate=True).stats
        assert tree["categories"]["eips"]["accepted_by_depth"] == stats.accepted_by_depth
        assert stats.accepted_by_depth[-1] > 0


def test_what_was_not_asked_for_is_the_pair_s_own():
    """The shape of tree and the ids that end texts are those of the checkpoint and its tokenizer."""
    engine, tokenizer = ReDrafter.from_pretrained(boxed_pair()), load_tokenizer(boxed_pair())
    engine = ReDrafter(engine.target, engine.drafter, TreeShape(3, 2))
    options = EvaluateOptions(num_prompts=1, new_tokens=6, temperatures=(0,))
    pair = Pair("base", "drafter", "its drafter", tokenizer, engine)
    [one] = evaluate(pair, options)["temperatures"]
    assert [tree["tree"] for tree in one["trees"]] == ["3x2, 7 nodes", "3x2, final beams"]
    assert (one["all_texts"]["texts"], one["all_texts"]["tokens"], one["all_texts"]["ended"]) == (3, 18, 0)
    [first, *_] = PromptSource([], tokenizer, 1).by_category(500).values()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(write_texts(engine.target, first, 6).continuations[0][2])
    assert evaluate(pair, options)["temperatures"][0]["texts"]["classic_books"]["ended"] == 1


def test_the_table_shows_every_number(measured):
    _, document, out = measured
    lines = out.splitlines()
    assert lines[0] == document["command"]
    assert "3 prompts in 2 categories from rows.jsonl" in out
    for one in document["temperatures"]:
        for tree in one["trees"]:
            rows = {**tree["categories"], "mean of categories": tree["mean_of_categories"], "all": tree["all_steps"]}
            for name, row in rows.items():
                rates = "  ".join("    -" if rate is None else f"{rate:.3f}" for rate in row["acceptance"])
                shown = [line for line in lines if line.startswith(f"  {name}") and line.endswith(rates)]
                assert any(f"  {row['tokens_per_step']:.3f}  " in line for line in shown), (tree["tree"], name)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--new-tokens 1", "--new-tokens must be from 2 to 1000000, got 1"),
        ("--temperatures=0,-1", "--temperatures must be from 0 to 1e+30, got 0.0,-1.0"),
        ("--temperatures nan", "--temperatures must be from 0 to 1e+30, got nan"),
        ("--shapes 0x5", "--shapes are beams x depth"),
        ("--shapes 5x", "--shapes: write beams x depth, such as 5x5,1x4, not '5x'"),
        ("--shapes 5x5x5", "such as 5x5,1x4, not '5x5x5'"),
        ("--shapes 5,5", "such as 5x5,1x4, not '5,5'"),
        ("--shapes=", "such as 5x5,1x4, not ''"),
        ("--node-budgets many", "--node-budgets"),
        ("--tree 5x5", "--tree"),
        ("--node-budgets 5,0", "--node-budgets must be from 1 to 1000000, got 5,0"),
        ("--seed -1", "--seed must be from 0 to 4611686018427387903, got -1"),
        ("--temperatures 1e39", "--temperatures must be from 0 to 1e+30, got 1e+39"),
        ("--shapes 1x4096", "--shapes 1x4096 has 4097 nodes; at most 4096"),
        (f"--prompts {'n' * 300}", "is not a file"),
        ("--shapes 5000x2", "num_beams=5000 is more than the drafter's vocabulary"),
        ("--new-tokens 5000", "leaves no room for a prompt in the model's context"),
        ("--prompt-lengths 8,1", "--prompt-lengths must be from 2 to 1000000, got 8,1"),
        ("--prompt-lengths 8,900", "900 and --new-tokens 128 are more than the model's context of 1024"),
        ("--prompt-lengths 896,800", "--prompt-lengths 800: no prompt of the prompts that ship has as many tokens"),
        ("--prompt-lengths 8 --explain", "leave out --prompt-lengths, or --explain"),
        ("--data rows.jsonl", "--data is compared by --explain only: give --explain too, or leave --data out"),
        ("--explain --shapes 5x5,1x4", "--explain explains one tree: give one of --shapes, got 5x5,1x4"),
        ("--explain --node-budgets 5,6", "--explain explains one tree: give one of --node-budgets, got 5,6"),
        ("--explain --data gone.jsonl", "gone.jsonl cannot be read"),
        ("--explain --data val.jsonl", "--data val.jsonl: no row to train on; rows of split val and test are not"),
        ("--explain --data prompts.jsonl", "prompts.jsonl:1: a prompt without an answer"),
        ("--plot out.jpg", "--plot draws a .png"),
        ("--json nowhere/out.json", "cannot write nowhere/out.json (--json)"),
        ("--model ./gone", "./gone is not a directory"),
        ("--prompts gone.jsonl", "gone.jsonl cannot be read"),
        ("--prompts gone.txt", "cannot read prompts from gone.txt"),
        ("--prompts bad.jsonl", "bad.jsonl:2: not JSON"),
        ("--prompts train.jsonl", "train.jsonl holds no prompts: rows of the split train are left out"),
        ("--prompts long.txt --new-tokens 1000", "long.txt: no prompt of 1 to 24 tokens"),
    ],
)
def test_what_a_user_can_mend_exits_with_2_and_one_line(tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "fine enough"}\n{\n')
    for split in ("train", "val"):
        write(Path(f"{split}.jsonl"), [{"text": "one row alone", "split": split}])
    write(Path("prompts.jsonl"), ['"why?"'])
    Path("long.txt").write_text("so long " * 50)
    there = sorted(tmp_path.iterdir())
    more = [] if "--json" in words else ["--json", "out.json"]
    assert said in fails(capsys, "evaluate", *words.split(), *more)
    assert sorted(tmp_path.iterdir()) == there


def test_the_card_of_a_drafter_gets_the_table_that_was_measured(folder, tmp_path, capsys):
    base, drafter = folder / "base", tmp_path / "drafter"
    shutil.copytree(folder / "drafter", drafter)
    words = ["evaluate", "--model", str(base), "--prompts", write(tmp_path / "prompts.txt", ["Once upon"]), "--card"]
    words += ["--shapes", "3x2", "--new-tokens", "8", "--json", str(tmp_path / "report.json")]
    assert "give it with --drafter" in fails(capsys, *words)
    assert main([*words, "--drafter", str(drafter)]) == 0
    card = (drafter / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card
    document = json.loads((tmp_path / "report.json").read_text())
    for name, result in zip(("greedy", "temperature 1"), document["temperatures"], strict=True):
        stats = result["trees"][0]["all_steps"]
        shares = [f"{count / stats['steps']:.2f}" for count in stats["accepted_by_depth"]]
        assert f"| {name} | {stats['tokens_per_step']:.2f} | {shares[0]} | {shares[1]} |\n" in card
    own = "---\nlicense: mit\n---\n\n# Mine\n\n## Acceptance\n\nold numbers\n\n## Thanks\n\nto all\n"
    (drafter / "README.md").write_text(own)
    assert main([*words, "--drafter", str(drafter)]) == 0
    changed = (drafter / "README.md").read_text()
    assert changed.startswith("---\nlicense: mit\n---\n\n# Mine\n\n## Acceptance\n\nParts of")
    assert changed.endswith("|\n\n## Thanks\n\nto all\n")
    assert "old numbers" not in changed


def test_help_says_what_is_done_without_options(capsys):
    with pytest.raises(SystemExit) as end:
        main(["evaluate", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert out.startswith("usage: redrafter evaluate ")
    assert all(word in out for word in ("examples:", "(default: 0,1)", "--dtype"))
    assert "--num-beams" not in out


def test_a_new_table_of_acceptance_keeps_what_the_user_wrote_around_it():
    section = "## Acceptance\n\nnew\n"
    for before, after in (("# T\n\n", "# License\n\nMIT\n"), ("", "## More\n"), ("# T\n\n", "")):
        card = replace_acceptance(f"{before}## Acceptance \n\nold\n\n{after}", section)
        assert card.split() == f"{before}{section}\n{after}".split()
    assert replace_acceptance("# T\n", section) == f"# T\n\n{section}"


def test_a_card_that_is_no_text_is_named_before_anything_is_measured(folder, tmp_path, capsys):
    copy = shutil.copytree(folder / "drafter", tmp_path / "drafter")
    (copy / "README.md").write_bytes(b"\xff\xfe\x00")
    words = ["evaluate", "--model", str(folder / "base"), "--drafter", str(copy), "--card"]
    assert "is not text in UTF-8" in fails(capsys, *words)
