"""Processes started by a launcher, which must train one drafter together, and the trackers that they report to.

A process that waits in a collective for one that has ended fails with a traceback of the library that it waits in, or
waits for minutes. So each process is connected to the first one, and the system closes the connection of a process that
ends, however it ends. The one process that is to say so prints a line, and all end with exit code 2.
"""

import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, broadcast, broadcast_object_list

from redrafter.app.flags import flag
from redrafter.app.program import print_message
from redrafter.drafting.drafter_types import Drafter
from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError, first_line
from redrafter.train.config import TrainConfig

# What a process says before it closes its connection.
DONE = b"d"  # the training is done
FAILED = b"f"  # the process prints why it failed
LOST = b"l"  # another process was lost, and the first process has said so
TOKEN_BYTES = 16
CONNECT_SECONDS = 60.0
GREETING_SECONDS = 5.0  # that a connection may take to say whose it is
ERROR_SECONDS = 5.0  # that an error waits to learn whether it comes of a lost process
# Of a machine that is gone without a word: seconds until it is asked, between questions, and how many questions.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

# Environment variables of `accelerate launch` that ask for a way to spread the model, and the name of that way.
SPREADING_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launcher() -> None:
    """Raise `UnsupportedError` if accelerate is configured to spread the drafter in its own way."""
    for variable, name in SPREADING_VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UnsupportedError(
                f"accelerate is configured for {name}, which does not train drafters; start it with torchrun "
                "--nproc-per-node N, or run accelerate config again without it; --shard-base spreads the base, and "
                "--shard-drafter the drafter"
            )


def stays_on_cpu(config: TrainConfig) -> bool:
    """Return whether to train on the CPU: because `config` asks for it, or because there is no other device.

    accelerate joins several processes on CPUs to one group only if it is told that they use the CPU.
    """
    return config.cpu or not torch.accelerator.is_available()


def new_accelerator(config: TrainConfig, **arguments: Any) -> Accelerator:
    """Make an accelerator as `accelerate launch` configured it, with the mixed precision and the device of `config`.

    `arguments` are further ones of `Accelerator`.

    Raises:
        UnsupportedError: accelerate is configured to spread the drafter in its own way.
        ArgumentError: This is one of several processes that would each train a drafter of its own, or the only process
            and `config` asks for several.
    """
    check_launcher()
    # With one draft step the matrix of the recurrence's state has no gradient.
    handler = DistributedDataParallelKwargs(find_unused_parameters=config.draft_len == 1)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, cpu=stays_on_cpu(config), kwargs_handlers=[handler], **arguments
    )
    started = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if accelerator.num_processes == 1 < started:
        raise ArgumentError(
            f"{started} processes were started, which cannot work together on {accelerator.device.type}; "
            "start one, or pass --cpu"
        )
    for name in ("shard_base", "shard_drafter"):
        if getattr(config, name) and accelerator.num_processes == 1:
            raise ArgumentError(f"{flag(name)} is for several processes: start them with accelerate launch")
    return accelerator


def broadcast_weights(drafter: Drafter, accelerator: Accelerator) -> None:
    """Give the first process's weights to the drafters of all. Collective: call it on every rank."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(broadcast(weight.to(accelerator.device, copy=True)))


def launcher_refused() -> bool:
    """Return whether `check_launcher` raises, and report its error once. Collective: call it in every process.

    The processes return together, because a launcher ends all of them, the reporting one too, as soon as one fails.
    """
    try:
        check_launcher()
    except UnsupportedError as error:
        state = PartialState(cpu=True)
        if state.is_main_process:
            print_message("error", error)
        state.wait_for_everyone()
        return True
    return False


def tracker_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of `Accelerator` that name the trackers. Raises `ArgumentError` if one is not installed."""
    for name in config.report_to:
        if find_spec(name) is None:
            raise ArgumentError(f"--report-to {name} needs its package: pip install {name}")
    return {"log_with": list(config.report_to), "project_dir": f"{config.output}.logs"} if config.report_to else {}


def start_trackers(config: TrainConfig, accelerator: Accelerator) -> None:
    """Start the trackers, with the options of this run."""
    if config.report_to:
        options = {
            name: value if isinstance(value, int | float | bool) else str(value)
            for name, value in asdict(config).items()
        }
        accelerator.init_trackers("redrafter", config=options)


@contextmanager
def watch_processes(accelerator: Accelerator) -> Iterator[None]:
    """End this process while the block runs if another one ends before its own block has. Collective.

    Raises `ArgumentError` where they cannot connect to the first one.
    """
    if accelerator.num_processes == 1:
        yield
        return
    try:
        connections = _connect(accelerator)
    except OSError as error:
        raise ArgumentError(
            f"the processes cannot connect to the first one at {os.environ['MASTER_ADDR']}: {first_line(error)}; let "
            "the machines reach each other on every port"
        ) from error
    watch = _Watch(accelerator.process_index, accelerator.num_processes, connections)
    try:
        yield
    except (ReDrafterError, KeyboardInterrupt, SystemExit):
        watch.stop(FAILED)
        raise
    except BaseException:
        watch.lost.wait(ERROR_SECONDS)
        if watch.lost.is_set():  # the error comes of it, and the thread ends the process
            watch.thread.join()
        watch.stop(FAILED)
        raise
    watch.stop(DONE)


class _Watch:
    """A thread that reads the connections of this process; `lost` is set once a process was lost.

    `connections` are by rank: of the first process those to all others, of others that to the first one.
    """

    def __init__(self, rank: int, count: int, connections: dict[int, socket.socket]):
        self.rank, self.count, self.connections = rank, count, connections
        self.lost = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watch processes", daemon=True)
        self.thread.start()

    def stop(self, word: bytes) -> None:
        """Tell the other processes that this one is about to end."""
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sendall(word)

    def _watch(self) -> None:
        """Read what the others say, until all are done or one is lost."""
        said = dict.fromkeys(self.connections, b"")
        with selectors.DefaultSelector() as selector:
            for rank, connection in self.connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank, word = key.data, b""  # nothing where the process has ended
                    with suppress(OSError):
                        word = self.connections[rank].recv(1)
                    said[rank] = word or said[rank]
                    if word == DONE:
                        selector.unregister(self.connections[rank])
                    elif not word or word == LOST:
                        self._end(rank, said[rank])

    def _end(self, lost_rank: int, word: bytes) -> None:
        """End this process because another one has ended, whose last word was `word`; nothing where it was killed."""
        self.lost.set()
        says_so = self.rank == 0 or (self.rank == 1 and lost_rank == 0)
        if says_so and not word:
            print_message(
                "error",
                f"process {lost_rank} of {self.count} (from 0) has ended before the training was done; start all of "
                "them again, with --resume where there are checkpoints",
            )
        self.stop(LOST)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(2)  # the main thread may wait for the process that was lost


def _connect(accelerator: Accelerator) -> dict[int, socket.socket]:
    """Connect every process with the first one, and return the connections by the rank at their other end.

    Collective: call it on every rank.
    """
    host = os.environ["MASTER_ADDR"]  # where launchers run the first process
    family = socket.getaddrinfo(host, None)[0][0]
    if not accelerator.is_main_process:
        port, token = broadcast_object_list([None, None])
        connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        connection.sendall(token + accelerator.process_index.to_bytes(4, "big"))
        return {0: _keep_alive(connection)}
    connections: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), family=family, backlog=accelerator.num_processes) as server:
        _, token = broadcast_object_list([server.getsockname()[1], secrets.token_bytes(TOKEN_BYTES)])
        server.settimeout(CONNECT_SECONDS)
        while len(connections) < accelerator.num_processes - 1:
            connection, _ = server.accept()
            connection.settimeout(GREETING_SECONDS)
            greeting = b""
            with suppress(OSError):
                greeting = connection.recv(TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if secrets.compare_digest(greeting[:TOKEN_BYTES], token):
                connections[int.from_bytes(greeting[TOKEN_BYTES:], "big")] = _keep_alive(connection)
            else:  # a stranger
                connection.close()
    return connections


def _keep_alive(connection: socket.socket) -> socket.socket:
    """Have the system notice within half a minute that the machine at the other end is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
