"""The shell completes commands, flags, choices and files."""

import shlex
import shutil
import subprocess

import pytest

from helpers.command_line import ran
from redrafter.cli import SCRIPTS, build_parser


def completed(tmp_path, *words: str) -> set[str]:
    """Return what bash offers for the last of the words after `redrafter`, in a folder with the file `text.jsonl`."""
    code, script, _ = ran("completion", "bash")
    assert code == 0
    (tmp_path / "text.jsonl").touch()
    typed = " ".join(shlex.quote(word) for word in ("redrafter", *words))
    run = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _redrafter"
    program = f"{script}{run}; for word in ${{COMPREPLY[@]}}; do echo $word; done"
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not done.stderr
    return {*done.stdout.split()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_flags_choices_and_files(tmp_path):
    assert completed(tmp_path, "") == {*build_parser().commands}
    assert {*SCRIPTS} < {*build_parser().commands}
    assert completed(tmp_path, "gen") == {"generate"}
    assert completed(tmp_path, "generate", "--draft-m") == {"--draft-model"}
    assert completed(tmp_path, "serve", "--scheduling-policy", "") == {"fcfs", "priority", "text.jsonl"}
    assert completed(tmp_path, "train", "--data", "te") == {"text.jsonl"}
    assert completed(tmp_path, "completion", "b") == {"bash"}
    for command in ("tune", "info", "evaluate", "regenerate", "convert"):
        assert completed(tmp_path, command, "--he") >= {"--help"}


def test_the_script_for_zsh_runs_bashs_completion_in_its_emulation():
    bash, zsh = (ran("completion", shell)[1] for shell in ("bash", "zsh"))
    assert zsh == "autoload -U +X bashcompinit && bashcompinit\n" + bash
    assert ran("completion", "fish")[0] == 2
