"""The zygote: a small process that holds one vocabulary and forks the processes of grammars.

It imports no torch, has one thread and holds no model, so a fork takes a millisecond and shares the vocabulary.
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
    """Read a tokenizer, then fork a process for each connection received, until the program closes its socket.

    An empty frame is sent once the tokenizer is read; otherwise `import` or `reading`, by what failed, and a message.

    Args:
        descriptor: File descriptor of a Unix socket to the program.
    """
    # Signals for the program are ignored: when it stops, it ends its grammars by closing their sockets, once their
    # texts have ended. The program's process group is left but not its session, since niceness counts among the
    # processes of one session.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setpgrp()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    _prefer_for_oom_kill()
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
        except Exception as error:  # llguidance documents no class of errors
            send_frame(control, b"reading", str(error).encode(errors="replace"))
            return
        send_frame(control)
        del tokenizer
        _fork_for_each(control, lambda connection: run_child(connection, vocabulary))
    except (EOFError, OSError):
        return


def _prefer_for_oom_kill() -> None:
    """Let the kernel end grammars, and not the model, when memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have none
        file.write("1000")


def _fork_for_each(control: socket.socket, run: Callable[[socket.socket], None]) -> None:
    """Fork for each connection that arrives over the control socket, and call `run` in the child."""
    gc.collect()
    gc.freeze()  # pages that no process writes to stay shared
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            try:
                child = os.fork() == 0
            except OSError:
                continue  # leaving the context closes the connection, which tells the program
            if child:
                control.close()
                _silence_stderr()
                try:
                    run(connection)
                finally:
                    os._exit(0)


def _silence_stderr() -> None:
    """Send stderr to nowhere: Rust would write a trace of its calls there when memory runs out."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
