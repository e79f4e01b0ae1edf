"""Coordinate processes started by a launcher that train one drafter together, and start their trackers.

A process that waits in a collective for an exited process fails with a library's traceback, or waits for minutes. So
each process is connected to the first one, and the system closes the connection of a process that exits for any reason.
Then one process prints an error, and all exit with code 2.
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
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError, first_line
from redrafter.parallel.launched import launched_processes
from redrafter.train.config import TrainConfig

# Messages that a process sends before it closes its connection.
DONE = b"d"  # the training is done
FAILED = b"f"  # the process prints its own error
LOST = b"l"  # another process was lost, and the first process has reported it
TOKEN_BYTES = 16
CONNECT_SECONDS = 60.0
GREETING_SECONDS = 5.0  # time limit for a connection to identify its process
ERROR_SECONDS = 5.0  # time that an exception waits, to find out whether a lost process caused it
# TCP keepalive detects a machine that disappears: idle seconds before probes, seconds between them, and their number.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

# Environment variables of `accelerate launch` that enable another way to shard the model, with its name.
SPREADING_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launcher() -> None:
    """Raise `UnsupportedError` if accelerate is configured to shard the drafter itself."""
    for variable, name in SPREADING_VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UnsupportedError(
                f"accelerate is configured for {name}, which does not train drafters; start it with torchrun "
                "--nproc-per-node N, or run accelerate config again without it; --shard-base spreads the base, and "
                "--shard-drafter the drafter"
            )


def stays_on_cpu(config: TrainConfig) -> bool:
    """Return whether to train on the CPU: because `config` sets it, or because there is no other device.

    accelerate creates a process group on CPUs only if this is passed to it explicitly.
    """
    return config.cpu or not torch.accelerator.is_available()


def new_accelerator(config: TrainConfig, **arguments: Any) -> Accelerator:
    """Create an accelerator with the settings of `accelerate launch` and the mixed precision and device of `config`.

    `arguments` are further arguments of `Accelerator`.

    Raises:
        UnsupportedError: accelerate is configured to shard the drafter itself.
        ArgumentError: Several processes would each train a separate drafter, or `config` requires several processes
            and there is only one.
    """
    check_launcher()
    # With a single draft step the recurrence's state matrix has no gradient, which DDP otherwise rejects.
    handler = DistributedDataParallelKwargs(find_unused_parameters=config.draft_len == 1)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, cpu=stays_on_cpu(config), kwargs_handlers=[handler], **arguments
    )
    # accelerate silently falls back to independent processes if it cannot form a group, so compare with the launcher.
    started = launched_processes()
    if accelerator.num_processes == 1 < started:
        raise ArgumentError(
            f"{started} processes were started, which cannot work together on {accelerator.device.type}; "
            "start one, or pass --cpu"
        )
    for name in ("shard_base", "shard_drafter"):
        if getattr(config, name) and accelerator.num_processes == 1:
            raise ArgumentError(f"{flag(name)} is for several processes: start them with accelerate launch")
    return accelerator


def broadcast_weights(drafter: DrafterModel, accelerator: Accelerator) -> None:
    """Broadcast the first process's weights to all drafters. Collective: call it on every rank."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(broadcast(weight.to(accelerator.device, copy=True)))


def launcher_refused() -> bool:
    """Return whether `check_launcher` raises an error, and print it once. Collective: call it on every rank.

    The processes return together, because a launcher terminates all of them, including the one that prints, as soon as
    one fails.
    """
    try:
        check_launcher()
    except UnsupportedError as error:
        # There is no accelerator yet that identifies the main process.
        state = PartialState(cpu=True)
        if state.is_main_process:
            print_message("error", error)
        state.wait_for_everyone()
        return True
    return False


def tracker_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the tracker arguments of `Accelerator`. Raises `ArgumentError` if a tracker is not installed."""
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
    """Exit this process if another one exits before its block has ended. Collective: call it on every rank.

    Raises `ArgumentError` if processes cannot connect to the first one.
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
        # A collective fails on all processes when one is lost; wait to learn whether this is such an error.
        watch.lost.wait(ERROR_SECONDS)
        if watch.lost.is_set():  # the lost process caused this error; the thread reports it and exits
            watch.thread.join()
        watch.stop(FAILED)
        raise
    watch.stop(DONE)


class _Watch:
    """A thread that reads the connections of this process; `lost` is set once a process was lost.

    `connections` maps ranks to connections: the first process has one to every other, the others one to the first.
    """

    def __init__(self, rank: int, count: int, connections: dict[int, socket.socket]):
        self.rank, self.count, self.connections = rank, count, connections
        self.lost = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watch processes", daemon=True)
        self.thread.start()

    def stop(self, word: bytes) -> None:
        """Notify the other processes that this one is about to exit."""
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sendall(word)

    def _watch(self) -> None:
        """Read messages of the other processes until all are done or one is lost."""
        said = dict.fromkeys(self.connections, b"")
        with selectors.DefaultSelector() as selector:
            for rank, connection in self.connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank, word = key.data, b""  # empty if the process has exited
                    # A reset connection also means that the process has exited.
                    with suppress(OSError):
                        word = self.connections[rank].recv(1)
                    said[rank] = word or said[rank]
                    if word == DONE:
                        selector.unregister(self.connections[rank])
                    elif not word or word == LOST:
                        self._end(rank, said[rank])

    def _end(self, lost_rank: int, word: bytes) -> None:
        """Exit this process because another one exited; `word` is its last message, empty if it was killed."""
        # Set first: the main thread may be about to report an error that the lost process caused.
        self.lost.set()
        # Exactly one process prints: the first, or the second if the first was lost.
        says_so = self.rank == 0 or (self.rank == 1 and lost_rank == 0)
        if says_so and not word:
            print_message(
                "error",
                f"process {lost_rank} of {self.count} (from 0) has ended before the training was done; start all of "
                "them again, with --resume where there are checkpoints",
            )
        self.stop(LOST)
        # `os._exit` does not flush buffers.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(2)  # not sys.exit: the main thread may be blocked in a collective with the lost process


def _connect(accelerator: Accelerator) -> dict[int, socket.socket]:
    """Connect every process to the first one, and return the connections by peer rank.

    Collective: call it on every rank.
    """
    host = os.environ["MASTER_ADDR"]  # launchers run the first process on this host
    # The address may be IPv6.
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
            # Any host can connect to this port, so the peer must send the token that was broadcast through accelerate.
            connection, _ = server.accept()
            connection.settimeout(GREETING_SECONDS)
            greeting = b""
            with suppress(OSError):
                greeting = connection.recv(TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if secrets.compare_digest(greeting[:TOKEN_BYTES], token):
                connections[int.from_bytes(greeting[TOKEN_BYTES:], "big")] = _keep_alive(connection)
            else:  # not a process of this training
                connection.close()
    return connections


def _keep_alive(connection: socket.socket) -> socket.socket:
    """Enable TCP keepalive, so that a peer machine that disappears is detected within half a minute."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not available on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
