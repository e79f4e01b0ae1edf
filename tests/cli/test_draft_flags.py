"""Flags of draft models and of prompt lookup in `generate`."""

import json

import pytest

from helpers.command_line import (
    TEXT,
    fails,
)

ADAPTIVE = {"num_beams": 1, "draft_len": 4, "nodes": 5}
SMALL = ADAPTIVE | {"draft_from_text": 16}
SAMPLED = ("--temperature", "1", "--seed", "3")


@pytest.mark.parametrize("sampling", [(), SAMPLED])
@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ("--draft-model small --draft-len 3", SMALL | {"draft_len": 3, "nodes": 4}),
        ("--draft-model small --num-beams 2 --node-budget 5", SMALL | {"num_beams": 2}),
        ("--draft-model small --num-beams 5 --draft-len 8", SMALL | {"num_beams": 5, "draft_len": 8, "nodes": 12}),
        ("--draft-model small --adaptive", ADAPTIVE),
        ("--draft-model small --acceptance match", SMALL),
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
    ],
)
def test_flags_for_another_way_to_draft_are_refused_by_name(folder, capsys, flags, says):
    names = {name: str(folder / name) for name in ("small", "drafter", "foreign")}
    args = flags.format(**names).split()
    assert says.format(**names) in fails(capsys, "generate", "--model", str(folder / "merged"), *args, "ja")


def test_more_words_to_look_up_than_there_are(folder, generate, expected):
    assert generate("ja", "--prompt-lookup", "--ngram", "500")[0] == expected("ja") + "\n"
