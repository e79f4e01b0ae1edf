"""Start commands in processes of their own, forked from a server that has imported the package."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import redrafter.cli

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["redrafter.train.train_drafter", "redrafter.train.regenerate.command", "redrafter.convert.convert_checkpoint"]
)


def start(words: list[str], output: Path, **environment: object) -> BaseProcess:
    """Start `redrafter` with these words and variables of the environment; it prints to the file `output`."""
    process = SERVER.Process(target=_run, args=(words, output, environment))
    process.start()
    return process


def start_together(commands: Sequence[list[str]], folder: Path, **environment: object) -> list[BaseProcess]:
    """Start a command line for each rank, as torchrun does; they print to `said.RANK` in a folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    environment |= {"WORLD_SIZE": len(commands), "LOCAL_WORLD_SIZE": len(commands)}
    return [
        start(words, folder / f"said.{rank}", RANK=rank, LOCAL_RANK=rank, **environment)
        for rank, words in enumerate(commands)
    ]


def _run(words: list[str], output: Path, environment: dict[str, object]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    with open(output, "w") as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(redrafter.cli.main(words))
