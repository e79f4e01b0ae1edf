"""Flags that are misspelt, and flags of other programs and commands: honoured or refused."""

import argparse
import json
from contextlib import suppress
from functools import partial

import pytest

from helpers.command_line import byte_tokenizer, fails, ran
from redrafter.app.foreign_flags import ALIASES, REPEATED
from redrafter.app.parser import Parser
from redrafter.cli import SCRIPTS, main, measure_options
from redrafter.cli.commands import build_parser
from redrafter.convert.convert_checkpoint import main as convert
from redrafter.errors import did_you_mean


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["convert", "--redrafter_greedy"], "--redrafter-greedy-search"),
        (["serve", "--kv-cache-reuse"], None),
        (["serve", "--speculate"], None),
        (["generate", "--no-compare"], None),
        (["generate", "--top-a", "1"], "--top-p"),
        (["generate", "--temprature", "1"], "--temperature"),
        (["generate", "--num_beam=3"], "--num-beams"),
        (["bench", "--batch-size", "1"], "--batch-sizes"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--pool", "1"], None),
        (["convert", "--output_dri", "x"], "--output-dir"),
    ],
)
def test_a_hint_is_a_slip_away_and_never_the_opposite(capsys, args, hint):
    err = fails(capsys, *args)
    assert "unrecognized arguments: " in err
    assert ("did you mean" in err) == (hint is not None)
    assert hint is None or f"did you mean {hint}? (see" in err


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("draft_lne", ["draft_len", "draft_len_per_beam"], "draft_len"),
        ("--no-compile", ["--compile"], None),
        ("--host", ["--port"], None),
        ("compile", ["no_compile"], None),
        ("seed", ["spread", "seeds"], "seeds"),
        ("x", [], None),
    ],
)
def test_the_names_that_a_misspelt_one_may_mean_are_close_and_never_its_opposite(word, known, found):
    assert did_you_mean(word, known) == ("" if found is None else f"; did you mean {found}?")


@pytest.mark.parametrize(
    ("command", "theirs", "ours"),
    [
        ("generate", ["--max_output_len=7", "a"], ["--max-new-tokens", "7", "a"]),
        ("generate", ["--max-output-len", "7", "--random_seed", "3", "a"], ["--max-new-tokens=7", "--seed=3", "a"]),
        ("generate", ["--input_text", "a", "b c", "--top_k", "3"], ["--top-k", "3", "a", "b c"]),
        ("generate", ["--num-beams", "3", "--input_text=a"], ["--num-beams", "3", "a"]),
        ("generate", ["--input_text", "5", "--max_output_len", "7"], ["5", "--max-new-tokens", "7"]),
        ("generate", ["--stop_words", " x", "y", "--input_text", "a"], ["--stop", " x", "--stop", "y", "a"]),
        ("generate", ["--num_draft_tokens", "3", "a"], ["--draft-len", "3", "a"]),
        ("generate", ["a", "--use_draft_logits"], ["a", "--acceptance", "rejection"]),
        ("generate", ["a", "--use-logits"], ["a", "--acceptance", "rejection"]),
        ("generate", ["a", "--model_dir", "m"], ["a", "--model", "m"]),
        ("generate", ["--", "--max_output_len"], ["--", "--max_output_len"]),
        ("generate", ["--kv_cache_dtype", "fp8", "a"], ["--kv-cache-dtype=fp8", "a"]),
        ("chat", ["--max_output_len", "7"], ["--max-new-tokens", "7"]),
    ],
)
def test_what_has_an_equal_here_is_honoured(command, theirs, ours):
    assert build_parser().parse_args([command, *theirs]) == build_parser().parse_args([command, *ours])


def test_compare_takes_the_flags_of_the_script_that_it_replaces():
    theirs, ours = ["--dataset=p.json", "--output-len", "9"], ["--prompts", "p.json", "--max-new-tokens", "9"]
    found = [measure_options.build_parser("compare").parse_args(words) for words in (theirs, ours)]
    assert found[0] == found[1]


@pytest.mark.parametrize("command", ["generate", "serve", "bench"])
def test_a_format_of_keys_and_values_is_named_from_a_list(capsys, command):
    err = fails(capsys, command, "--kv-cache-dtype", "int8", *["m"] * (command != "bench"))
    assert "argument --kv-cache-dtype: invalid choice: 'int8' (choose from" in err
    assert "fp8_e5m2" in err


@pytest.mark.parametrize("args", [["--model", "m"], ["--model_dir=m"], ["--port", "9", "--hf_model_dir", "m"], ["m"]])
def test_serve_takes_its_model_by_a_flag_too(capsys, args):
    assert main(["serve", "--print-config", *args]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "m"


def test_serve_refuses_a_flag_without_a_model_and_two_models(capsys):
    assert "argument --model: expected a value" in fails(capsys, "serve", "--print-config", "--model")
    assert "unrecognized arguments: n" in fails(capsys, "serve", "--print-config", "m", "--model", "n")


@pytest.mark.parametrize(
    ("command", "typed", "says"),
    [
        ("generate", "--engine_dir e", "unrecognized arguments: --engine-dir; docs/migration.md"),
        ("generate", "--tokenizer_dir t", "docs/migration.md has other programs' flags"),
        ("serve", "--gpu-memory-utilization 0.9", "docs/migration.md"),
        ("serve", "--max-model-len 9", "did you mean --max-seq-len?"),
        ("generate", "--streaming", "unrecognized arguments: --streaming; docs/migration.md"),
        ("generate", "--use_draft_logits=False", "--use_draft_logits is a switch"),
        ("generate", "--max_output_len", "argument --max_output_len: expected a value"),
    ],
)
def test_what_has_no_equal_here_is_refused_with_the_nearest_option_or_the_page(capsys, command, typed, says):
    assert says in fails(capsys, command, *typed.split())


@pytest.fixture
def parsers(monkeypatch) -> dict[str, Parser]:
    """Return the parser of every command."""
    found = {name: parser for name, parser in build_parser().commands.items() if name not in SCRIPTS}

    def parse_args(parser, args=None):
        found[parser.prog.removeprefix("redrafter ")] = parser
        raise KeyboardInterrupt

    monkeypatch.setattr(Parser, "parse_args", parse_args)
    for name in SCRIPTS:
        with suppress(KeyboardInterrupt):
            main([name])
    assert {*SCRIPTS} < {*found}
    return found | {name: measure_options.build_parser(name) for name in measure_options.COMMANDS}


def test_every_name_of_the_tables_is_that_of_some_command(parsers):
    for flag, names in ALIASES.items():
        assert {parser.own_name(flag) for parser in parsers.values()} - {None} == {*names}, flag
    assert {*REPEATED} < {*ALIASES}


# Words that a user of TensorRT-LLM, or of another command, types; and what they are here.
OF_OTHERS = """
generate | Hi --lora_dir d --hf_data_type bf16        | Hi --adapter d --dtype bfloat16
compare  | --dataset f --output_len 7                 | --prompts f --max-new-tokens 7
serve    | --model d --dtype half                     | d --dtype float16
train    | --model d --dataset f --output o           | REQUIRED
evaluate | --dataset f --max-new-tokens 7             | --prompts f --new-tokens 7
convert  | --model d --drafter e --output o           | --model-dir d --drafter-model-dir e --output-dir o
convert  | --dtype half                               | --dtype float16
info     | --model d                                  | d
"""


@pytest.mark.parametrize("line", OF_OTHERS.strip().splitlines())
def test_what_users_of_other_programs_and_commands_type_is_honoured(parsers, line):
    line = line.replace("REQUIRED", "--model d --data f --output o")
    command, typed, here = (part.strip() for part in line.split(" | "))
    parse = partial(argparse.ArgumentParser.parse_args, parsers[command])
    assert parse(typed.split()) == parse(here.split())


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("bf16", "bfloat16"), ("int8", None)])
def test_number_formats_of_files_have_the_same_names_as_on_the_command_line(tmp_path, word, dtype):
    (tmp_path / "c.json").write_text(json.dumps({"dtype": word}))
    code, out, err = ran("serve", "--print-config", "--config", str(tmp_path / "c.json"))
    assert (code, json.loads(out)["dtype"] if out else None) == (0 if dtype else 2, dtype)
    assert ("dtype: invalid choice: 'int8'" in err) == (dtype is None)


def test_the_command_of_the_draft_target_documents_runs_with_the_flags_that_have_an_equal(
    generate, folder, expected, capsys
):
    text = ["--kv_cache_free_gpu_memory_fraction=0.5", "--max_output_len=9", "--input_text=ja"]
    out, err = generate("--draft-model", str(folder / "small"), "--num_draft_tokens=4", *text)
    assert out == expected("ja", max_new_tokens=9) + "\n"
    assert "redrafter: note: " not in err
    assert "unrecognized arguments: --engine-dir" in fails(capsys, "generate", "--engine_dir", "e", "--num_beams", "1")


@pytest.mark.parametrize(
    ("command", "args", "says"),
    [
        ("generate", "--temperature 0.7 0.2 ja", "--temperature takes one value, and 0.2 after it"),
        ("generate", "--temperature=0.7 0.2 ja", "for one a prompt: --temperature 0.7,0.2"),
        ("generate", "--top-k 5 3 ja", "--top-k takes one value, and 3 after it would be a PROMPT"),
        ("generate", "--random_seed 5 -1.5e3 ja", "--random_seed takes one value"),
        ("generate", "--temperature 0.7,0.2,0.1 ja so", "3 values for 2 prompts"),
        ("generate", "--temperature 0.7,0 ja so", "each --temperature must be above 0, got 0.7,0"),
        ("generate", "--temperature 0.7,nan ja so", "each --temperature must be above 0"),
        ("serve", "--port 8000 9000", "--port takes one value, and 9000 after it would be a MODEL"),
        ("compare", "--temperature 0.7,0.2", "--temperature"),
        ("chat", "--temperature 0.7,0.2", "--temperature"),
        ("generate", "ja --logit-bias 5", "write token ids and numbers, such as 11=-100,42=2.5, not '5'"),
        ("generate", "ja --logit-bias 5=nan", "--logit-bias must be of finite numbers"),
        ("generate", "ja --logit-bias 999=1", "--logit-bias 999 is out of range"),
        ("generate", "ja --stop-token-ids -1", "--stop-token-ids -1 is out of range"),
        ("generate", "ja --stop-token-ids 999", "the model has 259 ids, from 0"),
        ("generate", "ja --bad-words=", "--bad-words needs a value"),
        ("serve", "--capture=", "--capture needs a value, got an empty one"),
        ("generate", "ja --frequency-penalty inf", "--frequency-penalty must be a finite number"),
    ],
)
def test_numbers_that_would_be_taken_for_something_else_are_refused(folder, capsys, command, args, says):
    model = [] if command == "serve" else ["--model", str(folder / "merged")]
    assert says in fails(capsys, command, *args.split(), *model)


@pytest.mark.parametrize("args", [["0.2", "--temperature", "0.7"], ["--temperature", "0.7", "--", "0.2"]])
def test_a_prompt_may_be_a_number_where_it_cannot_be_mistaken(generate, args):
    assert json.loads(generate("--json", *args)[0])["prompts"] == ["0.2"]


def test_each_prompt_may_have_a_temperature(generate):
    def texts(*args: str) -> list[str]:
        return json.loads(generate(*args, "--json")[0])["texts"]

    both = json.loads(generate("--temperature", "0.7,2", "--seed", "5", "ja", "Zürich", "--compare", "--json")[0])
    assert both["compare"][1]["same"] == 2
    alone = [("0.7", "5", "ja"), ("2", "6", "Zürich")]
    assert both["texts"] == [texts("--temperature", t, "--seed", seed, prompt)[0] for t, seed, prompt in alone]
    twice = texts("--temperature=0.7,2", "--num-return-sequences=2", "--seed=5", "ja", "so")
    assert (len(twice), twice[0]) == (4, both["texts"][0])


@pytest.mark.parametrize("option", ["--bad-words", "--logit-bias", "--stop-token-ids"])
def test_options_of_texts_are_those_of_generate(generate, expected, option):
    e, r, i, *spaced = byte_tokenizer()("eri r", add_special_tokens=False).input_ids
    word, theirs = {
        "--bad-words": ("r", {"bad_words_ids": [[r], spaced]}),
        "--logit-bias": (f"{e}=-100,{r}=-100", {"sequence_bias": {(e,): -100.0, (r,): -100.0}}),
        "--stop-token-ids": (f"{r},{i}", {"eos_token_id": [2, r, i]}),
    }[option]
    out, _ = generate("Zü", option, word)
    assert out == expected("Zü", **theirs) + "\n"
    assert out != expected("Zü") + "\n"
    assert out == generate("Zü", "--no-speculate", option, word)[0]


@pytest.mark.parametrize("name", ["--frequency-penalty", "--presence-penalty"])
def test_penalties_of_a_command_line_reach_the_texts(generate, name):
    document = json.loads(generate("ja", name, "3", "--compare", "--json")[0])
    assert document["compare"][1]["same"] == 1
    assert document["texts"] != json.loads(generate("ja", "--json")[0])["texts"]


def test_ends_of_a_chat_are_joined_by_those_that_were_asked_for(generate, expected):
    ids = byte_tokenizer()("i", add_special_tokens=False).input_ids
    out, _ = generate("ja", "--chat", "--stop-token-ids", str(ids[0]))
    assert out == expected("u:ja\na:", templated=True, eos_token_id=[2, *ids]) + "\n"


def test_a_temperature_that_is_typed_wins_over_a_checkpoint_that_says_greedy(folder, capsys, tmp_path):
    pair = ["--model_dir", str(folder / "base"), "--drafter_model_dir", str(folder / "drafter")]
    assert convert([*pair, "--output_dir", str(tmp_path / "greedy"), "--redrafter_greedy_search"]) == 0
    assert json.loads((tmp_path / "greedy" / "redrafter.json").read_text())["greedy_search"] is True
    capsys.readouterr()

    def run(model, *args: str) -> dict:
        line = ["generate", "--model", str(model), "--max-new-tokens", "30", "--compare", "--json", *args, "ja"]
        assert main(line) == 0
        return json.loads(capsys.readouterr().out)

    sampled = run(tmp_path / "greedy", "--temperature", "2", "--seed", "3")
    assert sampled["texts"] == run(folder / "merged", "--temperature", "2", "--seed", "3")["texts"]
    assert sampled["seeds"] == [3]
    assert sampled["compare"][1]["same"] == 1
    greedy = run(tmp_path / "greedy")
    assert greedy["seeds"] is None
    assert greedy["texts"] != sampled["texts"]
