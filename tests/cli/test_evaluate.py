"""`redrafter evaluate`: its records add up, and say what a replay counts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from helpers.chats import write
from helpers.command_line import fails, measured
from helpers.models import DRAFTER_ALONE
from redrafter import ReDrafter, boxed_pair
from redrafter.app.loading import Pair
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.cli import main
from redrafter.cli.measure import evaluate_pair
from redrafter.cli.measure_options import EvaluateOptions, Search
from redrafter.formats.model_card import replace_acceptance
from redrafter.measure.decode import write_texts
from redrafter.measure.misses import MISSES
from redrafter.measure.prompts import PromptSource
from redrafter.measure.record import Record, Records
from redrafter.measure.replay import ReplayStats, replay
from redrafter.tree.sizes import TreeShape


@pytest.fixture(scope="module")
def boxed() -> tuple[ReDrafter, PreTrainedTokenizerBase]:
    return ReDrafter.from_pretrained(boxed_pair()), load_tokenizer(boxed_pair())


def evaluated(engine: ReDrafter, tokenizer: PreTrainedTokenizerBase, **options) -> tuple[list[Record], list[str]]:
    """Evaluate a pair; return its records, and the lines of an explanation."""
    records, pair = Records({}), Pair("base", "drafter", "its", tokenizer, engine)
    lines = evaluate_pair(pair, EvaluateOptions(**options), records)
    return records.rows, lines


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[list[dict], str]:
    """Run the command, with an explanation. Returns its records and what it printed."""
    folder = tmp_path_factory.mktemp("evaluate")
    rows = [{"text": f"{n} men went to mow, went to mow a meadow", "source": f"kind {n % 2}"} for n in range(3)]
    prompts = write(folder / "rows.jsonl", rows)
    words = "--new-tokens 12 --shapes 3x2 --node_budgets 5 --seed 4 --batch-size 2 --device cpu --explain"
    plot = folder / "out.png"
    found = measured("evaluate", *words.split(), "--prompts", prompts, "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    return found


def test_records_say_what_was_measured(run):
    records, out = run
    trees = ["3x2, 5 nodes", "3x2, final beams"]
    expected = [(tree, t, kind) for t in (0, 1) for tree in trees for kind in ("kind 0", "kind 1", None)]
    assert [(one["mode"], one["temperature"], one.get("category")) for one in records] == expected
    facts = {"model": "boxed", "drafter": "drafter", "dtype": "float32", "device": "cpu", "prompts": ["rows.jsonl"]}
    assert records[0]["conditions"].items() >= facts.items()
    assert records[0]["conditions"]["versions"].keys() >= {"redrafter", "torch", "transformers", "python"}
    assert [one["texts"] for one in records[:3]] == [2, 1, 3]
    assert "boxed, drafter drafter, float32" in out
    for one in records:
        assert f"{one['tokens_per_step']:.3f}" in out


def test_categories_add_up(run):
    records = run[0]
    for first in range(0, len(records), 3):
        *parts, total = records[first : first + 3]
        for name in ("texts", "tokens", "steps", "emitted", "drafted", "accepted"):
            assert sum(part[name] for part in parts) == total[name], name
        assert [sum(each) for each in zip(*(part["accepted_by_depth"] for part in parts), strict=True)] == total[
            "accepted_by_depth"
        ]
        # The prefill draws a text's first token; steps draw the others.
        assert total["emitted"] == total["tokens"] - 3
        assert total["tokens_per_step"] == total["emitted"] / total["steps"]


def test_the_explanation_adds_up_to_the_steps_of_the_replay(run):
    records, out = run
    explained = [one for one in records if "misses" in one]
    assert [(one["mode"], one["temperature"]) for one in explained] == [("3x2, 5 nodes", 0), ("3x2, 5 nodes", 1)]
    for one in explained:
        found = one["misses"]
        every = found["groups"]["all drafts"]
        assert found["tokens_per_step"] == pytest.approx(one["tokens_per_step"])
        assert (found["steps"], every["accepted"]) == (one["steps"], one["accepted"])
        missed = sum(every[name] for name in MISSES)
        assert every["tried"] - every["accepted"] == missed
        assert missed + found["all_accepted"] + found["text_ended"] == one["steps"]
        assert found["groups"]["kind 0"]["tried"] + found["groups"]["kind 1"]["tried"] == every["tried"]
    assert out.count("why drafts were missed: 3x2, 5 nodes, temperature ") == 2
    advice = out.splitlines()[out.splitlines().index("suggestions") + 1 :]
    names = ("temperature", "certainty", "context")
    assert all(any(line.startswith(f"  {name}: ") for line in advice) for name in names)
    assert "3 prompts are too few to conclude" in out


@pytest.mark.variant  # texts of the boxed pair by four trees
@pytest.mark.filterwarnings("ignore:draft_len_per_beam")
def test_one_run_counts_trees_deeper_than_the_drafter_was_trained_for(boxed):
    """The boxed drafter was trained for five drafts; where its base repeats itself, ten are right."""
    engine, tokenizer = boxed
    assert engine.drafter.config.trained_draft_len == 5
    searches = tuple(Search(*sizes) for sizes in ((5, 5), (5, 7), (3, 10), (5, 10)))
    prompts = PromptSource([], tokenizer, 1).by_category(900)
    records, _ = evaluated(*boxed, shapes=searches, node_budgets=(26,), num_prompts=1, new_tokens=32, temperatures=(0,))
    for beams, depth in searches:
        name = f"{beams}x{depth}, 26 nodes"
        [record] = [one for one in records if one.category == "eips" and one.mode == name]
        own = ReDrafter(engine.target, engine.drafter, TreeShape(beams, depth, 26), options=DRAFTER_ALONE)
        ids = torch.tensor(prompts["eips"])
        stats = own.generate(ids, do_sample=False, max_new_tokens=32, return_dict_in_generate=True).stats
        assert record.accepted_by_depth == stats.accepted_by_depth
        assert stats.accepted_by_depth[-1] > 0


def test_what_was_not_asked_for_is_the_pair_s_own(boxed):
    """The shape of tree and the ids that end texts are those of the checkpoint and its tokenizer."""
    engine, tokenizer = ReDrafter(boxed[0].target, boxed[0].drafter, TreeShape(3, 2)), load_tokenizer(boxed_pair())
    options = {"num_prompts": 1, "new_tokens": 6, "temperatures": (0,)}
    records, _ = evaluated(engine, tokenizer, **options)
    assert list(dict.fromkeys(one.mode for one in records)) == ["3x2, 7 nodes", "3x2, final beams"]
    whole = next(one for one in records if one.category is None)
    assert (whole.texts, whole.tokens, whole.ended) == (3, 18, 0)
    [first, *_] = PromptSource([], tokenizer, 1).by_category(500).values()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(write_texts(engine, first, 6).continuations[0][2])
    records, _ = evaluated(engine, tokenizer, **options)
    assert next(one for one in records if one.category == "classic_books").ended == 1


@pytest.mark.parametrize(
    "options, tree",
    [
        ({}, "5x5, 12 nodes"),
        ({"node_budgets": (7,)}, "5x5, 7 nodes"),
        ({"shapes": (Search(2, 3),), "node_budgets": (4,)}, "2x3, 4 nodes"),
    ],
)
def test_the_tree_that_is_explained_is_the_one_that_generate_would_verify(boxed, tmp_path, options, tree):
    prompts = write(tmp_path / "rows.jsonl", ['"the sea"'])
    records, _ = evaluated(*boxed, prompts=(prompts,), explain=True, new_tokens=3, temperatures=(0,), **options)
    assert [record.mode for record in records if record.misses] == [tree]


def test_each_length_counts_what_a_replay_of_its_prompts_counts(boxed, tmp_path):
    engine, tokenizer = boxed
    words = ["the moon is far away and the sun is farther " * 3, "it was a night without any stars at all " * 3]
    path = write(tmp_path / "rows.jsonl", [{"text": text} for text in words])
    settings = {"prompt_lengths": (12, 3), "new_tokens": 12, "shapes": (Search(3, 4),), "seed": 5}
    records, _ = evaluated(engine, tokenizer, prompts=(path,), **settings)
    measured = [(one.temperature, one.prompt_length) for one in records if one.mode == "3x4, 13 nodes"]
    assert measured == [(0, 3), (0, 12), (1, 3), (1, 12)]
    choice = PromptSource([path], tokenizer, seed=5).of_lengths((3, 12))
    for one in records:
        if one.mode == "3x4, 13 nodes":
            texts = write_texts(engine, choice[one.prompt_length]["rows"], 12, one.temperature, 5)
            shape = TreeShape(3, 4, 13)
            stats = ReplayStats.sum(shape, replay(engine.drafter, engine.target, texts, [shape])[0])
            assert (one.steps, one.accepted_by_depth) == (stats.steps, stats.accepted_by_depth)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--temperatures=0,-1", "--temperatures must be from 0 to 1e+30, got (0.0, -1.0)"),
        ("--shapes 0x5", "--shapes are beams x depth"),
        ("--shapes 5x", "--shapes: write beams x depth, such as 5x5,1x4, not '5x'"),
        ("--tree 5x5", "--tree"),
        ("--shapes 1x4096", "--shapes 1x4096 has 4097 nodes; at most 4096"),
        ("--shapes 5000x2", "num_beams=5000 is more than the drafter's vocabulary"),
        ("--new-tokens 5000", "a prompt of 1 tokens and 5000 new ones are more than the 1024 of the model's context"),
        (
            "--prompt-lengths 8,900",
            "a prompt of 900 tokens and 128 new ones are more than the 1024 of the model's context",
        ),
        ("--prompt-lengths 896,800", "--prompt-lengths 896: no prompt of the prompts that ship has as many tokens"),
        ("--prompt-lengths 8 --explain", "leave out --prompt-lengths, or --explain"),
        ("--explain --shapes 5x5,1x4", "--explain explains one tree: give one of --shapes, got 5x5,1x4"),
        ("--plot out.jpg", "--plot draws a .png"),
        ("--prompts 4", "there is no such file; --num-prompts 4 measures the first 4"),
        ("--prompts bad.jsonl", "bad.jsonl:2: not JSON"),
        ("--prompts train.jsonl", "train.jsonl holds no prompts: rows of the split train are left out"),
        ("--prompts long.txt --new-tokens 1000", "long.txt: no prompt of 1 to 24 tokens"),
    ],
)
def test_what_a_user_can_mend_exits_with_2_and_one_line(tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "fine enough"}\n{\n')
    write(Path("train.jsonl"), [{"text": "one row alone", "split": "train"}])
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
    records = [json.loads(line) for line in (tmp_path / "report.json").read_text().splitlines()]
    for name, stats in zip(("greedy", "temperature 1"), records[::2], strict=True):
        shares = [f"{count / stats['steps']:.2f}" for count in stats["accepted_by_depth"]]
        assert f"| {name} | {stats['tokens_per_step']:.2f} | {shares[0]} | {shares[1]} |\n" in card
    own = "---\nlicense: mit\n---\n\n# Mine\n\n## Acceptance\n\nold numbers\n\n## Thanks\n\nto all\n"
    (drafter / "README.md").write_text(own)
    assert main([*words, "--drafter", str(drafter)]) == 0
    changed = (drafter / "README.md").read_text()
    assert changed.startswith("---\nlicense: mit\n---\n\n# Mine\n\n## Acceptance\n\nParts of")
    assert changed.endswith("|\n\n## Thanks\n\nto all\n")
    assert "old numbers" not in changed


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
