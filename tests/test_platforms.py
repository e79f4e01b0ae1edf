"""What runs on Windows and macOS, as far as Linux can show it: modules and functions that these lack are not used."""

import subprocess
import sys
from pathlib import Path

import pytest

from redrafter.cli import main

pytestmark = pytest.mark.variant  # each test has a process of its own
# Other libraries are imported as on Linux; then what some system lacks is removed, and argv[1:] are commands to run.
PROGRAM = """
import asyncio, logging, multiprocessing, os, select, signal, socket, sys
import accelerate, psutil, tokenizers, torch, transformers
import transformers.models.llama.modeling_llama
for name in ("fcntl", "grp", "pwd", "resource", "termios", "triton", "tty", "uvloop"):
    sys.modules[name] = None
absent = {
    os: ("fork", "getuid", "killpg", "nice", "O_NONBLOCK", "sched_getaffinity", "sched_setaffinity", "setpgrp"),
    select: ("epoll", "poll"),
    signal: ("setitimer", "SIGCHLD", "SIGHUP", "SIGIO", "SIGKILL", "SIGQUIT", "SIGUSR1"),
    socket: ("AF_UNIX",),
}
for module, names in absent.items():
    for name in names:
        vars(module).pop(name, None)
from redrafter.cli import main
for line in sys.argv[1:]:
    print(line, "ends with", main(line.split()))
"""


def ran(*lines: str) -> str:
    """Return what commands print that run without what other systems lack."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *lines], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if " ends with " in line] == [
        f"{line} ends with 0" for line in lines
    ]
    return done.stdout


def test_generate_and_info_use_nothing_that_other_systems_lack():
    boxed = Path(__file__).parents[1] / "redrafter" / "boxed"
    out = ran(f"info {boxed}", "generate --max-new-tokens 8 ja")
    assert "Llama" in out


def test_a_training_uses_nothing_that_other_systems_lack(tmp_path):
    boxed, data = Path(__file__).parents[1] / "redrafter" / "boxed", tmp_path / "data.jsonl"
    data.write_text('{"text": "The old man looked at the sea and said nothing."}\n' * 8)
    ran(f"train --model {boxed} --data {data} --output {tmp_path}/out --cpu --steps 1 --batch-size 2")
    assert (tmp_path / "out" / "config.json").is_file()


def test_windows_is_refused_by_the_server_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["serve", "--port", "0"]) == 2
    assert capsys.readouterr().err == (
        "redrafter: error: redrafter serve needs signals and sockets of Unix: start it in WSL\n"
    )
