"""Mistakes, and what the files of a checkpoint say, are reported before torch and transformers are imported."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import ran
from redrafter.checkpoints.merged import boxed_pair
from redrafter.convert.info import UNCHECKED

# Runs each command line of argv[1] in turn; prints a list of exit codes and of the modules that it has imported.
PROGRAM = """
import contextlib, io, json, sys
from redrafter.cli import main
results = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    results.append((code, err.getvalue(), [name for name in ("torch", "transformers") if name in sys.modules]))
print(json.dumps(results))
"""


def run_apart(*lines: list[str]) -> list[tuple[int, str, list[str]]]:
    """Return exit code, stderr and heavy modules after each of several command lines of one process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder with a drafter's output, a file and a drafter that is given as a model."""
    place = tmp_path_factory.mktemp("mistakes")
    for name in ("out", "out.jsonl"):
        (place / name).mkdir() if name == "out" else (place / name).write_text("{}\n")
    (place / "out" / "config.json").write_text('{"model_type": "redrafter"}')
    (place / "data.jsonl").write_text('{"text": "a"}\n')
    (place / "trained.checkpoints").mkdir()
    return place


def mistakes(place: Path, port: int) -> dict[str, tuple[list[str], str]]:
    """Return command lines by what is wrong with them, each with a part of the message."""
    boxed, missing, out, data = str(boxed_pair()), str(place / "missing"), str(place / "out"), str(place / "data.jsonl")
    train = ["train", "--model", boxed, "--data", data, "--output"]
    again = ["regenerate", "--model", boxed, "--data", data, "--output"]
    parts = ["--base-model-checkpoint-dir", boxed, "--drafter-model-dir", f"{boxed}/drafter", "--output-dir"]
    return {
        "generate: no model": (["generate", "--model", missing, "ja"], "is not a directory"),
        "generate: a drafter as model": (["generate", "--model", out, "ja"], "is a drafter, not a model"),
        "generate: an empty name": (["generate", "--model", "", "ja"], "--model needs a value"),
        "generate: no drafter": (["generate", "--drafter", missing, "ja"], "is not a directory"),
        "generate: no draft model": (["generate", "--draft-model", missing, "ja"], "is not a directory"),
        "generate: no file": (["generate", "--file", missing], f"--file {missing} cannot be read"),
        "generate: no image": (["generate", "--chat", "--image", missing, "ja"], "--image"),
        "generate: no adapter": (["generate", "--adapter", f"a={missing}", "ja"], "is not a directory"),
        "generate: a value": (["generate", "--temperature", "-1", "ja"], "--temperature must be"),
        "chat: no model": (["chat", "--model", missing], "is not a directory"),
        "chat: no GGUF file": (["chat", "--model", f"{missing}.gguf"], "does not exist: a GGUF file"),
        "compare: no prompts": (["compare", "--prompts", f"{missing}.txt"], "cannot read prompts"),
        "compare: no output": (["compare", "--json", f"{missing}/x.json"], "(--json)"),
        "bench: no suite": (["bench", "--suite", missing], "is not a directory"),
        "bench: no folder": (["bench", "--json", f"{missing}/x.json"], "(--json)"),
        "evaluate: no drafter": (["evaluate", "--drafter", missing], "is not a directory"),
        "evaluate: no prompts": (["evaluate", "--prompts", f"{missing}.jsonl"], "cannot be read"),
        "evaluate: no plot": (["evaluate", "--plot", f"{missing}/a.png"], "--plot"),
        "train: no data": ([*train[:4], f"{missing}.jsonl", *train[5:], "x"], "cannot be read"),
        "train: output is there": ([*train, out], f"--output {out} is there already"),
        "train: checkpoints are there": ([*train, str(place / "trained")], "holds an earlier training's checkpoints"),
        "train: no drafter": ([*train, "x", "--drafter", missing], "is not a directory"),
        "regenerate: another file is there": ([*again, f"{out}.jsonl"], "out.jsonl:1 is no row of"),
        "regenerate: no data": ([*again[:4], f"{missing}.jsonl", *again[5:], "x"], "cannot be read"),
        "convert: no source": (["convert", "--drafter-model-dir", missing, "--output-dir", "x"], "is not a directory"),
        "convert: output is there": (["convert", *parts, out], f"--output-dir {out} is there already"),
        "convert: no tokenizer": (["convert", *parts, "x", "--tokenizer-dir", missing], "has no tokenizer_config.json"),
        "info: no directory": (["info", missing], "is not a directory"),
        "info: no GGUF file": (["info", f"{missing}.gguf"], "does not exist: a GGUF file"),
        "info: a drafter alone": (["info", "--drafter", missing], "--drafter needs the model"),
        "serve: no model": (["serve", missing], "is not a directory"),
        "serve: no GGUF file": (["serve", f"{missing}.gguf"], "does not exist: a GGUF file"),
        "serve: no drafter": (["serve", boxed, "--drafter", missing], "is not a directory"),
        "serve: no template": (["serve", boxed, "--chat-template", missing], f"--chat-template {missing} cannot be"),
        "serve: no keys": (["serve", boxed, "--api-key-file", missing], f"--api-key-file {missing} cannot be"),
        "serve: no certificate": (["serve", boxed, "--ssl-certfile", missing], "--ssl-certfile"),
        "serve: no config": (["serve", boxed, "--config", missing], "cannot be read"),
        "serve: no adapter": (["serve", boxed, "--lora-modules", f"a={missing}"], "is not a directory"),
        "serve: an open folder": (["serve", boxed, "--capture", out], "may be entered by others"),
        "serve: the port is taken": (["serve", boxed, "--port", str(port)], "choose another --port"),
    }


def test_a_mistake_is_reported_before_torch_and_transformers_are_imported(place):
    os.chmod(place / "out", 0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = mistakes(place, taken.getsockname()[1])
        results = run_apart(*(words for words, _ in cases.values()))
    for (name, (_, says)), (code, err, modules) in zip(cases.items(), results, strict=True):
        assert (code, modules) == (2, []), (name, err)
        assert says in err, (name, err)
        assert err.count("\n") == 1, (name, err)


def test_help_and_info_of_a_directory_need_no_torch_and_info_says_what_the_checked_one_says(folder):
    directories = [str(boxed_pair()), *(str(folder / name) for name in ("base", "drafter", "merged"))]
    lines = [["generate", "--help"], *(["info", "--json", directory] for directory in directories)]
    assert [(code, modules) for code, _, modules in run_apart(*lines)] == [(0, [])] * len(lines)
    for directory in directories:
        quick, checked = (json.loads(ran("info", "--json", directory, *more)[1]) for more in ([], ["--check"]))
        assert quick.pop("unchecked") == UNCHECKED
        for part in ("path", "kind", "shape"):
            assert quick.get(part) == checked.get(part)
        for part in ("model", "drafter"):
            assert quick.get(part, {}).items() <= checked.get(part, {}).items()


def test_options_are_importable_without_torch():
    code = "import sys; from redrafter import EngineOptions; EngineOptions(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_imports_of_libraries_are_not_interrupted_by_garbage_collections_and_scanned_by_none_but_the_last():
    code = (
        "import gc; from redrafter.app.program import import_libraries; ran = []; "
        "circle = type('Circle', (), {'__del__': lambda self: print('collected')})(); circle.itself = circle; "
        "del circle; "
        "gc.callbacks.append(lambda phase, info: ran.append(phase)); import_libraries('redrafter.errors'); "
        "print(len(ran), gc.isenabled(), gc.get_freeze_count() > 50000)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "0 True True\ncollected\n"
    )
