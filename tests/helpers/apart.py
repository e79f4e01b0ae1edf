"""Commands in processes of their own, without the start of an interpreter for each."""

import multiprocessing
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import redrafter.cli

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["redrafter.train.train_drafter", "redrafter.train.regenerate.command", "redrafter.convert.convert_checkpoint"]
)


def start(words: list[str], said: Path, **environment: object) -> BaseProcess:
    """`redrafter` with these words. said: the file for what it prints."""
    process = SERVER.Process(target=_run, args=(words, said, environment))
    process.start()
    return process


def _run(words: list[str], said: Path, environment: dict[str, object]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    with open(said, "w") as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(redrafter.cli.main(words))
