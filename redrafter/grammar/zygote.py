"""A small process that holds one vocabulary and forks the processes of grammars.

It knows neither torch nor the model and has one thread, so a fork takes a millisecond and shares the vocabulary.
"""

import gc
import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from redrafter.grammar.wire import receive_frame, send_frame

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Read a tokenizer from this socket, then fork for each connection that comes over it, until it is closed."""
    # A program that is told to stop tells its grammars when their texts have ended, by closing their sockets. Its
    # group of processes is left, and not its session: niceness counts among the processes of one session.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    os.setpgrp()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries children
    _die_first()
    control = socket.socket(fileno=descriptor)
    try:
        end, tokenizer = json.loads(bytes(receive_frame(control))), json.loads(bytes(receive_frame(control)))
        try:
            import llguidance

            from redrafter.grammar.child import run_child
        except ImportError as error:
            send_frame(control, b"import", str(error).encode(errors="replace"))
            return
        tokenizer["padding"] = tokenizer["truncation"] = None
        try:
            vocabulary = llguidance.LLTokenizer(json.dumps(tokenizer, ensure_ascii=False), eos_token=end)
        except Exception as error:  # whatever llguidance has against a tokenizer
            send_frame(control, b"reading", str(error).encode(errors="replace"))
            return
        send_frame(control)
        del tokenizer
        _fork_for_each(control, lambda connection: run_child(connection, vocabulary))
    except (EOFError, OSError):
        return


def _die_first() -> None:
    """Where memory runs out, let the kernel end grammars and not the model."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have none
        file.write("1000")


def _fork_for_each(control: socket.socket, run: Callable[[socket.socket], None]) -> None:
    gc.collect()
    gc.freeze()  # pages that nobody writes on are shared
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            try:
                child = os.fork() == 0
            except OSError:
                continue  # the connection is closed, which says enough
            if child:
                control.close()
                _silence()
                try:
                    run(connection)
                finally:
                    os._exit(0)


def _silence() -> None:
    """Where memory runs out, Rust writes a trace of its calls."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
