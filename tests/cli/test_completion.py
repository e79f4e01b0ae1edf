"""The shell completes commands, flags, choices and files."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import ran
from redrafter.cli import SCRIPTS
from redrafter.cli.commands import build_parser

pytest.importorskip("shtab")

# bash has no command that completes a line: its function is called as readline calls it.
BASH = """source {script}
COMP_WORDS=({line}); COMP_CWORD={last}
compopt() {{ :; }}
_shtab_redrafter redrafter "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = "source {script}; complete --do-complete {line}"


def completed(shell: str, folder: Path, *words: str) -> set[str]:
    """Return what a shell offers for the last of the words after `redrafter`, in a folder with `text.jsonl`."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    (folder / "text.jsonl").touch()
    script = folder / "script"
    if not script.exists():
        script.write_text(ran("completion", shell)[1])
    line = ("redrafter", *words)
    if shell == "bash":
        program = BASH.format(script=script, line=shlex.join(line), last=len(words))
        command = ["bash", "--norc", "-c", program]
    else:
        command = ["fish", "--no-config", "-c", FISH.format(script=script, line=shlex.quote(" ".join(line)))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert not done.stderr
    return {offer.partition("\t")[0] for offer in done.stdout.splitlines() if offer}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_completes_commands_flags_choices_and_files(tmp_path, shell):
    assert completed(shell, tmp_path, "") >= {*build_parser().commands}
    assert {*SCRIPTS} < {*build_parser().commands}
    assert completed(shell, tmp_path, "gen") == {"generate"}
    assert completed(shell, tmp_path, "generate", "--draft-m") == {"--draft-model"}
    assert completed(shell, tmp_path, "serve", "--scheduling-policy", "") == {"fcfs", "priority"}
    assert completed(shell, tmp_path, "train", "--data", "te") == {"text.jsonl"}
    assert completed(shell, tmp_path, "completion", "b") == {"bash"}
    assert "--help" in completed(shell, tmp_path, "convert", "--he")


def test_the_script_of_each_shell_has_the_flags_of_each_command_in_its_syntax(tmp_path):
    for shell in ("bash", "zsh", "fish"):
        code, script, _ = ran("completion", shell)
        assert code == 0
        for name in build_parser().commands:
            assert name in script
        assert all(flag in script for flag in ("draft-model", "scheduling-policy", "lora-rank"))
        (tmp_path / shell).write_text(script)
        if shutil.which(shell):
            subprocess.run([shell, "-n", tmp_path / shell], check=True)
    assert ran("completion", "tcsh")[0] == 2


def test_other_commands_import_neither_the_library_that_writes_scripts_nor_the_parsers_of_others():
    code = "import sys; from redrafter.cli import main; main(['info', '--help'])"
    unused = "assert not {'shtab', 'redrafter.cli.commands', 'redrafter.app.options'} & sys.modules.keys()"
    program = f"import contextlib\nwith contextlib.suppress(SystemExit):\n    {code}\n{unused}"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
