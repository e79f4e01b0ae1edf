"""The command `generate`, run in process on a tiny pair, what all commands share, and a real program."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch

import redrafter
from helpers.command_line import (
    NEW,
    SPECIAL,
    TEXT,
    byte_fallback_tokenizer,
    byte_tokenizer,
    fails,
    merge,
    ran,
    typed,
)
from redrafter import DrafterConfig, RecurrentDrafter, ReDrafter
from redrafter.app.loading import ChatEncoder
from redrafter.cli import main
from redrafter.cli.printer import GREEN, RESET, Printer, use_color
from redrafter.drafting.policy import CostPolicy
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.engine.detokenizer import Detokenizer
from redrafter.engine.engine import Engine
from redrafter.measure.trial import Trial


def test_streamed_text_is_what_model_generate_writes(generate, expected):
    out, err = generate("Zürich")
    assert out == expected("Zürich") + "\n"
    assert "€" in out
    assert "日本 🙂" in out
    assert re.fullmatch(rf"{NEW} tokens in [\d.]+ s, [\d.]+ tokens/s, [\d.]+ tokens per step\n", err)


@pytest.mark.parametrize("name, said", [("generate", "Zürich"), ("chat", "Zürich\n/stats")])
def test_steps_that_left_out_drafts_are_explained(name, said, folder, monkeypatch, capsys):
    monkeypatch.setattr(Engine, "pauses", True)
    monkeypatch.setattr(CostPolicy, "choose", lambda self, step: UndraftedProposer())
    typed(monkeypatch, said)
    words = [name, "--model", str(folder / "merged"), "--max-new-tokens", "8"]
    assert main(words) == 0
    said = re.findall(
        r"\d tokens per step; (\d+) of (\d+) steps left out drafts, which cost more", capsys.readouterr().err
    )
    assert [steps for steps in said if steps[0] == steps[1]]
    typed(monkeypatch, "Zürich")
    assert main([*words, "--no-speculate"]) == 0
    assert "left out" not in capsys.readouterr().err


def test_stop_ends_the_text_after_itself(generate, expected):
    out, _ = generate("Zürich", "--stop", "🙂", "--stop", "never")
    assert out == expected("Zürich").partition("🙂")[0] + "🙂\n"


def test_colours_only_when_asked(generate, expected):
    coloured, _ = generate("Zürich", "--color", "always")
    assert GREEN in coloured
    assert RESET in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == expected("Zürich") + "\n"
    plain, _ = generate("Zürich", "--color", "always", "--no-speculate")
    assert GREEN not in plain


def test_colour_auto_wants_a_terminal_and_no_objection(monkeypatch):
    terminal = types.SimpleNamespace(isatty=lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert use_color("auto", terminal)
    assert not use_color("never", terminal)
    assert not use_color("auto", io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color("auto", terminal)
    assert use_color("always", terminal)


def test_printer_keeps_rows_in_order_and_colours_only_drafts():
    tokenizer, out = byte_tokenizer(), io.StringIO()
    printer = Printer(tokenizer, ["[1/2] p", "[2/2] q"], out, color=True)
    a, b, c = tokenizer("abc", add_special_tokens=False).input_ids
    printer.put_step(1, [c, c], 0, ended=True)
    assert out.getvalue() == "[1/2] p\n"
    printer.put_step(0, [a, b, c], 2, ended=False)
    assert out.getvalue() == f"[1/2] p\n{GREEN}ab{RESET}c"
    printer.put_step(0, tokenizer("é").input_ids[1:2], 0, ended=False)
    printer.end()
    assert out.getvalue() == f"[1/2] p\n{GREEN}ab{RESET}c\ufffd\n[2/2] q\ncc\n"
    assert printer.texts == ["abc\ufffd", "cc"]


def test_json_is_the_only_output_and_agrees(generate, expected, folder):
    out, _ = generate("Zürich", "10 €", "--json")
    document = json.loads(out)
    assert out.count("\n") == 1
    assert (document["prompts"], document["tokens"]) == (["Zürich", "10 €"], [NEW, NEW])
    assert document["texts"] == [expected("Zürich"), expected("10 €")]
    assert document["seeds"] is document["compare"] is None
    stats = document["stats"]
    assert stats["emitted"] == sum(row["emitted"] for row in stats["rows"]) == 2 * NEW - 2
    assert stats["accepted"] == sum(stats["accepted_by_depth"]) > 0
    assert stats["tokens_per_step"] == stats["emitted"] / stats["steps"]
    assert document["tokens_per_second"] == pytest.approx(2 * NEW / document["seconds"])
    tree = ReDrafter.from_pretrained(folder / "merged").proposer_for(2)  # the costs of this model's steps select it
    assert document["shape"] == tree.sizes
    assert document["shape"]["draft_from_text"] == 16
    assert document["model"] == str(folder / "merged")
    assert (document["drafts"], document["drafter"]) == ("drafter", str(folder / "merged" / "drafter"))
    assert document["options"]["max_new_tokens"] == NEW
    assert (document["dtype"], document["device"]) == ("float32", "cpu")
    assert document["versions"]["redrafter"] == redrafter.__version__


@pytest.mark.parametrize("sampling", [(), ("--temperature", "2", "--num-return-sequences", "2")])
def test_compare_finds_the_same_tokens(generate, sampling):
    out, err = generate("Zürich", "--compare", "--json", *sampling)
    document = json.loads(out)
    plain, drafted = document["compare"]
    assert (drafted["same"], drafted["differences"]) == (drafted["texts"], [])
    assert drafted["speedup"] == pytest.approx(plain["seconds"] / document["seconds"])
    assert len(set(document["texts"])) == len(document["prompts"]) == drafted["texts"] == (2 if sampling else 1)
    assert (document["seeds"] is not None) == bool(sampling)
    assert [line.split()[0] for line in err.splitlines()[2:]] == [plain["mode"], "drafter"]
    assert err.endswith(f"{drafted['texts']} of {drafted['texts']}\n")


def test_compare_tells_where_tokens_differ(generate, monkeypatch):
    honest = Trial.run_batch

    def broken(self, *args, **changes):
        run = honest(self, *args, **changes)
        if not self.arguments["speculate"]:
            run.tokens[0][7] += 1
        return run

    monkeypatch.setattr(Trial, "run_batch", broken)
    _, err = generate("Zürich", "--compare")
    assert "0 of 1\n  OTHER TOKENS in prompt 1" in err
    assert re.search(r"\n  OTHER TOKENS in prompt 1 at new token 8: .+; rounding explains 0.0001\n    undrafted ", err)
    monkeypatch.setattr("redrafter.measure.record.tolerance", lambda *_: 1e9)
    document = json.loads(generate("Zürich", "--compare", "--json", "--dtype", "bfloat16")[0])
    assert document["compare"][1]["near_ties"] == 1
    _, err = generate("Zürich", "--compare", "--dtype", "bfloat16")
    assert "0 of 1, 1 near-ties\n" in err
    assert "  near-tie in prompt 1 at new token 8: " in err


def test_a_seed_gives_the_same_text_with_and_without_speculation(generate):
    sampling = ("Zürich", "--temperature", "1.5", "--seed", "3")
    text = generate(*sampling)[0]
    assert text == generate(*sampling, "--no-speculate")[0]
    assert text != generate(*sampling[:-1], "4")[0]


def test_temperature_samples_from_all_tokens(generate, monkeypatch):
    seen = {}
    honest = ReDrafter.generate
    monkeypatch.setattr(ReDrafter, "generate", lambda self, *a, **kw: seen.update(kw) or honest(self, *a, **kw))
    generate("Zürich", "--temperature", "0.7")
    assert (seen["do_sample"], seen["temperature"], seen["top_k"]) == (True, 0.7, 0)


def test_commands_sample_as_the_models_own_generation_config_says(folder, tmp_path, capsys, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(folder / "merged", model)
    config = json.loads((model / "generation_config.json").read_text())
    seen = set()
    for do_sample, typed_alike in ((True, ["--temperature", "1.5", "--top-p", "0.9", "--top-k", "7"]), (False, [])):
        own = {"do_sample": do_sample, "temperature": 1.5, "top_p": 0.9, "top_k": 7}
        (model / "generation_config.json").write_text(json.dumps(config | own))
        for command, words in (("generate", ["--chat", "Zürich"]), ("chat", [])):
            texts = []
            for path, options in ((model, []), (folder / "merged", typed_alike)):
                typed(monkeypatch, "Zürich\n")
                words_of_model = ["--model", str(path), "--max-new-tokens", str(NEW), "--seed", "3"]
                assert main([command, *words_of_model, *options, *words]) == 0
                texts.append(capsys.readouterr().out)
            assert texts[0] == texts[1]
            seen.add((do_sample, texts[0]))
    assert len(seen) == len({text for _, text in seen}) == 2  # sampling draws other tokens than the likeliest


def test_a_batch_prints_each_row_as_alone(generate, expected, tmp_path):
    prompts = ["Zürich", "10\u2028€", "ja! " * 20]  # a line separator of Unicode ends no prompt
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeff" + "\r\n\r\n".join(prompts) + "\n  \n", encoding="utf-8", newline="")
    out, _ = generate("--file", str(file))
    headings = ["[1/3] Zürich", "[2/3] 10 €", "[3/3] " + ("ja! " * 20)[:57] + "..."]
    assert out == "".join(f"{line}\n{expected(prompt)}\n" for line, prompt in zip(headings, prompts, strict=True))
    assert out == generate(*prompts)[0]


def test_rows_of_a_file_are_prompts_as_for_other_commands(generate, expected, tmp_path):
    chat = {"messages": [{"role": "user", "content": "Zürich"}, {"role": "assistant", "content": "no"}]}
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "\n".join(map(json.dumps, [chat, {"prompt": "10 €"}, {"text": "für"}, {"text": "no", "split": "train"}]))
    )
    out, _ = generate("--file", str(file))
    texts = expected("u:Zürich\na:", templated=True), expected("10 €"), expected("für")
    headings = "[1/3] Zürich", "[2/3] 10 €", "[3/3] für"
    assert out == "".join(f"{line}\n{text}\n" for line, text in zip(headings, texts, strict=True))
    out, _ = generate("--file", str(file), "--chat", "--json")
    assert json.loads(out)["prompts"] == ["Zürich", "10 €", "für"]
    assert json.loads(out)["texts"][1] == expected("u:10 €\na:", templated=True)
    file.write_text('{"colour": "blue"}')
    code, _, err = ran("generate", "--file", str(file))
    assert (code, f"{file}:1: a row has one of text, messages" in err) == (2, True)


def test_an_empty_text_of_a_model_with_a_chat_template_has_a_hint(generate, monkeypatch):
    ends = str(byte_tokenizer().eos_token_id)
    out, err = generate("Zürich", "--logit-bias", f"{ends}=100")
    assert out.strip() == ""
    assert "note: 1 of 1 texts are empty: the model has a chat template" in err
    assert "add --chat" in err
    assert "note:" not in generate("Zürich", "--chat", "--logit-bias", f"{ends}=100")[1]
    assert "note:" not in generate("Zürich")[1]


def test_stdin_is_one_prompt_without_its_last_newline(generate, expected, monkeypatch):
    typed(monkeypatch, "Zürich\nfür\n")
    assert generate()[0] == expected("Zürich\nfür") + "\n"


def test_chat_template_makes_a_turn(generate, expected):
    assert generate("Zürich", "--chat")[0] == expected("u:Zürich\na:", templated=True) + "\n"


def test_a_template_without_a_chat_is_refused(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content ~ mood }}")
    for given in (["--chat-template", str(tmp_path / "t.jinja")], ["--chat-template-kwargs", '{"mood": 1}']):
        code, _, err = ran("generate", "--model", str(folder / "merged"), "x", *given)
        assert (code, "are for chats: add --chat, or leave them out" in err) == (2, True)


def test_a_model_without_a_template_takes_a_plain_one(folder, tmp_path, capsys):
    shutil.copytree(folder / "merged", tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    chat = ["generate", "Zürich", "--chat", "--max-new-tokens", "4", "--model"]
    assert "--plain-chat-template" in fails(capsys, *chat, str(tmp_path / "bare"))
    same = ran("generate", "User: Zürich\nAssistant:", "--max-new-tokens", "4", "--model", str(tmp_path / "bare"))
    assert ran(*chat, str(tmp_path / "bare"), "--plain-chat-template")[1] == same[1]
    assert "has one" in fails(capsys, *chat, str(folder / "merged"), "--plain-chat-template")


@pytest.mark.parametrize(("config", "ends"), [(None, [2]), (5, [2, 5]), ([5, 2], [2, 5])])
def test_a_turn_also_ends_with_the_tokenizers_own_end(config, ends):
    model = types.SimpleNamespace(generation_config=types.SimpleNamespace(eos_token_id=config))
    pair = types.SimpleNamespace(tokenizer=byte_tokenizer(), engine=types.SimpleNamespace(model=model), name="m")
    assert ChatEncoder(pair).eos == ends


def test_a_warning_is_one_line(generate):
    _, err = generate("Zürich", "--draft-len-per-beam", "6")
    warning, _ = err.splitlines()
    assert warning.startswith("redrafter: warning: draft_len_per_beam=6 is more than the 5 steps")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("ja --num-beam 3", "did you mean --num-beams? (see redrafter generate --help)"),
        ("ja --temperature nan", "--temperature"),
        ("ja --top-p 0.9", "--temperature above 0"),
        ("ja --temperature 1 --min-p 1.5", "--min-p must be from 0 to 1, got 1.5"),
        ("ja --num-beams 500", "num_beams=500"),
        ("ja --num-return-sequences 2", "num_return_sequences"),
        ("ja --compare --no-speculate", "--no-speculate"),
        ("ja --file x", "not both"),
        *zip((["ja", "--stop", ""], [""], ["ja", ""]), ("--stop", *["the prompt is empty"] * 2), strict=True),
        *zip((["\udcff"], ["ja! " * 50]), ("UTF-8", "a prompt may have"), strict=True),
    ],
)
def test_mistakes_are_one_line_and_exit_2(folder, capsys, args, says):
    words = args.split() if isinstance(args, str) else args
    assert says in fails(capsys, "generate", "--model", str(folder / "merged"), *words)


def test_a_missing_or_misspelt_command_is_answered_with_the_commands(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("usage: redrafter "), "regenerate" in err) == ("", True, True)
    assert "there is no command generat; did you mean generate?" in fails(capsys, "generat", "ja")
    assert "there is no command frob: choose generate, chat, " in fails(capsys, "frob")


def test_a_missing_prompt_is_a_mistake(folder, capsys, monkeypatch, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    assert "empty" in fails(capsys, "generate", "--file", str(tmp_path / "empty.txt"))
    assert "'utf-8' codec" in fails(capsys, "generate", "--file", str(tmp_path / "latin.txt"))
    typed(monkeypatch, "\n")
    assert "empty" in fails(capsys, "generate")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "no prompt" in fails(capsys, "generate")


def test_what_cannot_be_loaded_is_named(folder, capsys, monkeypatch, tmp_path):
    assert "--drafter" in fails(capsys, "evaluate", "--model", str(folder / "base"))
    monkeypatch.setattr("redrafter.app.loading.boxed_pair", lambda: tmp_path / "boxed")
    assert "--model" in fails(capsys, "generate", "ja")


def test_truncated_weights_are_an_error(folder, capsys, tmp_path):
    broken = merge(folder / "base", folder / "drafter", tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").write_bytes(weights[:-100])
    assert "broken" in fails(capsys, "generate", "--model", str(broken), "ja")
    assert "model.safetensors" in fails(capsys, "info", str(broken))


def test_a_drafter_of_another_target_is_an_error(folder, capsys, tmp_path):
    RecurrentDrafter(DrafterConfig(vocab_size=259, hidden_size=24)).save_pretrained(tmp_path / "other")
    err = fails(capsys, "generate", "--model", str(folder / "base"), "--drafter", str(tmp_path / "other"), "ja")
    assert re.search("24.*32|32.*24", err)


def test_a_base_alone_drafts_recycled_tokens_and_a_line_says_so(folder, capsys, expected):
    base, note = str(folder / "base"), "holds no drafter, so tokens are recycled as drafts"
    generate = ["generate", "--model", base, "--max-new-tokens", str(NEW), "ja"]
    for flags, noted in (([], True), (["--no-speculate"], False), (["--prompt-lookup"], False)):
        assert main(generate + flags) == 0
        out, err = capsys.readouterr()
        assert (out, note in err) == (expected("ja") + "\n", noted), flags
    assert main([*generate, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["drafts"], document["drafter"]) == ("recycled tokens", None)
    error = fails(capsys, *generate, "--base-embedding")
    assert "--base-embedding is for a drafter: leave it out" in error
    error = fails(capsys, "evaluate", "--model", base)
    assert f"{base} holds no drafter that could be evaluated: give one (--drafter D)" in error


def test_a_prompt_may_be_longer_than_a_file_name():
    code, _, err = ran("generate", "--max-new-tokens", "1", "ja " * 100)
    assert code == 0, err


def test_a_prompt_that_is_a_models_directory_is_asked_about(folder, capsys, monkeypatch):
    base = str(folder / "base")
    err = fails(capsys, "generate", base, "once upon", "--max-new-tokens", "3")
    assert f"{base} is a model, and would be a text" in err
    assert f"type redrafter generate --model {base} 'once upon'; to continue that text, pipe it in" in err
    assert main(["generate", "--max-new-tokens", "3", "--model", str(folder / "merged"), base]) == 0


@pytest.mark.parametrize("make", [byte_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize("size", [1, 3])
def test_text_in_pieces_is_the_text(make, size):
    tokenizer = make()
    if make is byte_tokenizer:
        ids = tokenizer(TEXT * 8).input_ids
    else:
        hello, world, space, bang = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world", "▁", "!"])
        smiles = [len(SPECIAL) + byte for byte in "€🙂日本".encode() * 5]
        ids = [hello, world, bang, *smiles, world, space, *smiles, bang] * 4
    ids[9:9] = [tokenizer.eos_token_id] * 30  # special tokens print nothing
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_text_that_is_no_text_still_comes_and_costs_no_more_with_length(monkeypatch):
    tokenizer = byte_tokenizer()
    ids = torch.randint(3, 259, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    ids[1000:1200] = tokenizer("é").input_ids[1:2] * 200
    expected, decode, lengths = tokenizer.decode(ids), tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **kwargs: lengths.append(len(ids)) or decode(ids, **kwargs))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == expected
    assert max(lengths) < 80


def test_a_reader_that_has_left_is_no_error():
    code = "import sys; from redrafter.app.program import run_command; sys.exit(run_command(lambda: print('x') or 0))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.variant
def test_the_real_program(folder, expected):
    command = [sys.executable, "-m", "redrafter", "generate", "--model", str(folder / "merged"), "--max-new-tokens"]
    done = subprocess.run([*command, str(NEW)], input="Zürich\n".encode(), capture_output=True, check=False)
    assert done.stdout.decode() == expected("Zürich") + "\n"
    assert done.stderr.decode().count("\n") == 1
    assert done.returncode == 0
