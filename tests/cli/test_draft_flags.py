"""Flags of draft models and of prompt lookup in `generate`, and the config that stands for four of them."""

import json
import re

import pytest

from helpers.command_line import (
    TEXT,
    fails,
)
from redrafter import ArgumentError
from redrafter.app.engines import apply_draft_target_config
from redrafter.app.options import DraftOptions, LoadOptions

ADAPTIVE = {"num_beams": 1, "draft_len": 4, "nodes": 5}
SMALL = ADAPTIVE | {"draft_from_text": 16}
SAMPLED = ("--temperature", "1", "--seed", "3")
ONE = "--draft-target-model-config [4,[0],[0],False]"  # which stands for four flags
FOUR = ("--draft-len=3", "--device=cpu", "--draft-device=cpu", "--acceptance=match")


@pytest.mark.parametrize("sampling", [(), SAMPLED])
@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ("--draft-model small --draft-len 3", SMALL | {"draft_len": 3, "nodes": 4}),
        ("--draft-model small --num-beams 2 --node-budget 5", SMALL | {"num_beams": 2}),
        ("--draft-model small --num-beams 5 --draft-len 8", SMALL | {"num_beams": 5, "draft_len": 8, "nodes": 12}),
        ("--draft-model small --adaptive", ADAPTIVE),
        ("--draft-model small --draft-device cpu --acceptance match", SMALL),
        ("--prompt-lookup --draft-len 5 --ngram 3", {"ngram": 3, "draft_len": 5}),
    ],
)
def test_what_else_drafts_needs_no_drafter_and_writes_the_tokens_of_plain_decoding(
    folder, generate, expected, flags, shape, sampling
):
    words = flags.replace("small", str(folder / "small")).split()
    prompts, by_model = ("ja", TEXT * 2), "--draft-model" in flags
    document = json.loads(
        generate(*prompts, "--model", str(folder / "base"), *words, *sampling, "--compare", "--json")[0]
    )
    assert document["compare"][1]["same"] == len(prompts)
    names = ("draft model", str(folder / "small")) if by_model else ("prompt lookup", None)
    assert (document["drafts"], document["drafter"], document["shape"]) == (*names, shape)
    assert 0 < document["stats"]["accepted"] < document["stats"]["drafted"]
    assert sampling or document["texts"] == [*map(expected, prompts)]


def test_greedy_rejection_is_plain_decoding_too(folder, generate, expected):
    args = ("--draft-model", str(folder / "small"), "--acceptance", "rejection")
    assert generate("ja", *args)[0] == expected("ja") + "\n"
    sampled, again = (json.loads(generate("ja", *args, *SAMPLED, "--json")[0]) for _ in range(2))
    assert sampled["texts"] == again["texts"]
    assert 0 < sampled["stats"]["accepted"] < sampled["stats"]["drafted"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--draft-len 3", "--draft-len is for --draft-model or --prompt-lookup"),
        ("--adaptive", "--adaptive is for --draft-model"),
        ("--prompt-lookup --num-beams 2", "--num-beams is for a drafter or --draft-model"),
        ("--prompt-lookup --draft-quantization fp8", "--draft-quantization is for a drafter or --draft-model"),
        ("--prompt-lookup --base-embedding", "--base-embedding is for a drafter"),
        ("--draft-model {small} --drafter {drafter}", "--drafter and --draft-model exclude each other"),
        ("--draft-model {small} --draft-len-per-beam 2", "--draft-len-per-beam is for a drafter"),
        ("--draft-model {small} --ngram 2", "--ngram is for --prompt-lookup"),
        ("--draft-model {small} --prompt-lookup", "--draft-model and --prompt-lookup exclude each other"),
        ("--draft-model=", "an empty one"),
        ("--draft-model {drafter}", "{drafter} is a drafter, not a model"),
        ("--draft-model {foreign}", "use one of the same family, with the same tokenizer"),
        ("--draft-model {small} --num-beams 2 --acceptance rejection", "acceptance='match'"),
        *((f"--draft-model {{small}} {ONE} {flag}", f"says what {flag.split('=')[0]} says") for flag in FOUR),
        (ONE, "is for --draft-model"),
        ("--draft-model {small} --draft-target-model-config [4,[0,1],[0],False]", "a draft model is never split"),
        ("--draft-model {small} --draft-target-model-config [4,[0],[0,1,2],False]", "add --tensor-parallel-size 3"),
    ],
)
def test_flags_for_another_way_to_draft_are_refused_by_name(folder, capsys, flags, says):
    names = {name: str(folder / name) for name in ("small", "drafter", "foreign")}
    args = flags.format(**names).split()
    assert says.format(**names) in fails(capsys, "generate", "--model", str(folder / "merged"), *args, "ja")


def test_more_words_to_look_up_than_there_are(folder, generate, expected):
    assert generate("ja", "--prompt-lookup", "--ngram", "500")[0] == expected("ja") + "\n"


@pytest.mark.parametrize(
    ("text", "draft_device", "device", "acceptance"),
    [
        ("[4,[0],[1],False]", "cuda:0", "cuda:1", "match"),
        ("[4, [0], [1], true]", "cuda:0", "cuda:1", "rejection"),
        (" [4,[10],[0],false]", "cuda:10", "cuda:0", "match"),
        ("[4,[0],[0],True]", "cuda:0", "cuda:0", "rejection"),
    ],
)
def test_the_config_in_one_stands_for_four_flags(text, draft_device, device, acceptance):
    draft = DraftOptions(draft_model="d", adaptive=True, draft_target_model_config=text)
    four = DraftOptions("d", draft_len=4, acceptance=acceptance, adaptive=True, draft_device=draft_device)
    assert apply_draft_target_config(LoadOptions(num_beams=2), draft) == (LoadOptions(num_beams=2, device=device), four)
    assert apply_draft_target_config(LoadOptions(device="cpu"), four) == (LoadOptions(device="cpu"), four)


MALFORMED = (
    "4 [4] [4,[0],[1]] [4,[0],[1],False,0] [4,0,1,False] [4,[],[1],False] [4,[-1],[1],False] [4,[0],[True],False] "
    "[True,[0],[1],False] ['4',[0],[1],False] [4.0,[0],[1],False] [4,[0],[1],0] [4,[0],[1],None] [4,[0],['1'],False] "
    "[4,[0],[1],False [2+2,[0],[1],False] [4,{0},[1],False] [4,[0],{5:1},False] __import__('os') None"
)


def one_in_four(text: str) -> tuple[LoadOptions, DraftOptions]:
    return apply_draft_target_config(LoadOptions(), DraftOptions("d", draft_target_model_config=text))


def test_a_malformed_config_is_told_what_one_looks_like(folder, capsys):
    says = '--draft-target-model-config must look like "[4,[0],[1],False]": draft length'
    for text in ("", "[" * 1000, "[" * 1000 + "]" * 1000, "[4,[0],[1],False]\0", "4" * 5000, *MALFORMED.split()):
        with pytest.raises(ArgumentError, match=re.escape(says)):
            one_in_four(text)
    assert says in fails(capsys, "generate", "--draft-model", "d", "--draft-target-model-config", "4", "ja")


@pytest.fixture
def two_processes(monkeypatch):
    """Let commands believe that torchrun has started two processes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.mark.parametrize("text", ["[4,[0],[0,1],False]", "[4,[0,1],[0,1],False]"])
def test_processes_share_the_target_and_have_a_draft_model_each(two_processes, text):
    options, draft = one_in_four(text)
    assert (options.device, draft.draft_device, draft.draft_len) == (None, None, 4)


@pytest.mark.parametrize("text", ["[4,[0],[1],False]", "[4,[2],[0,1],False]", "[4,[0],[0,1,2],False]"])
def test_processes_must_be_those_of_the_target(two_processes, text):
    with pytest.raises(ArgumentError, match="must have its devices as"):
        one_in_four(text)
