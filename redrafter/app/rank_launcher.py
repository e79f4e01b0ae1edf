"""Start a command in several processes, as torchrun would, where `--tensor-parallel-size` asks for them."""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from tempfile import TemporaryDirectory

import psutil

from redrafter.app.program import import_libraries, print_message
from redrafter.errors import ArgumentError
from redrafter.parallel.launched import is_launched, launched_processes

FORWARDED = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 0.05  # between looks for signals to forward


def run_on_ranks(size: int | None, words: Sequence[str]) -> int | None:
    """Run a command line of this program on ranks of this machine, and wait for their end.

    Args:
        size: Number of ranks; None for the processes that torchrun has started, or one.
        words: The command line without the program's name.

    Returns:
        The exit code of the first rank that failed, 0 if none did; None if this process should run the command: it is
        one of the ranks, or needs no others.

    Raises:
        ArgumentError: torchrun has started another number of processes, or there are fewer GPUs than ranks.
    """
    if size is None or size == launched_processes():
        return None
    if is_launched():
        started = f"torchrun has started {launched_processes()}"
        raise ArgumentError(f"--tensor-parallel-size {size} starts ranks itself, and {started}: leave one of both out")
    import_libraries("redrafter.parallel.ranks").check_gpus(size, f"--tensor-parallel-size {size}")
    logging.disable(logging.ERROR)  # torch's report of a failure, which a rank reports in one line
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it: ranks share the cores
    received: list[int] = []
    for number in FORWARDED:
        signal.signal(number, lambda number, _: received.append(number))
    # In the main thread torch's agent would handle signals itself, and lose the exit codes of the ranks.
    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(_launch, size, words)
        _forward(received, launched)
    rank, code = launched.result()
    if code < 0 and -code not in received:
        print_message("error", f"the process of rank {rank} was ended by {signal.Signals(-code).name}")
    return code if code >= 0 else 128 - code  # the shell's convention for a process that a signal has ended


def _launch(size: int, words: Sequence[str]) -> tuple[int, int]:
    """Start the ranks and wait for their end; return the first that failed and its exit code, as `Popen` has it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    with TemporaryDirectory() as logs:
        one_node = LaunchConfig(1, 1, size, DefaultLogsSpecs(log_dir=logs), run_id="redrafter", rdzv_backend="c10d")
        config = replace(one_node, rdzv_endpoint="localhost:0", max_restarts=0)
        try:
            launch_agent(config, sys.executable, ["-m", "redrafter", *words])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return rank, failure.exitcode
    return 0, 0


def _forward(received: Sequence[int], launched: Future[tuple[int, int]]) -> None:
    """Send the first signal that this process receives to rank 0, and further ones to every rank, until all have ended.

    When rank 0 has ended, the agent ends the others. A signal to all could reach another rank first, whose end would
    then be an error of rank 0.
    """
    sent = 0
    while not wait([launched], timeout=POLL_SECONDS).done:
        ranks = sorted(psutil.Process().children(), key=lambda rank: rank.pid) if len(received) > sent else []
        for rank in ranks[: None if sent else 1]:
            rank.send_signal(received[sent])
        sent += bool(ranks)
