"""The process that encodes one long text, at low priority so that decoding of other requests does not slow down.

`redrafter.sandbox.child` forks it. It imports only tokenizers, and is killed at its limits of time and memory.
"""

import os
from array import array
from collections.abc import Callable

from tokenizers import Tokenizer

from redrafter.sandbox.child import bounded_work, limit_memory
from redrafter.sandbox.frames import FrameSocket, receive_frame, send_frame

NICENESS = 10  # about a tenth of the CPU share of a process with default priority
# Two megabytes of short words with some special tokens take 2.5 s and 700 MB.
CPU_SECONDS, CPU_SECONDS_PER_CHARACTER = 2.0, 2e-5
BYTES, BYTES_PER_CHARACTER = 64 << 20, 1 << 10


def prepare(spec: bytearray, options: bytearray) -> Callable[[FrameSocket], None]:
    """Load a tokenizer, and return the function that serves a process's connection.

    `spec` is the tokenizer as JSON; `options` is `1` if it encodes special tokens as text, else `0`. The process
    receives `1` if special tokens are added, else `0`, and the text, and sends its token ids as native uint32.
    """
    tokenizer = Tokenizer.from_str(spec.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = options == b"1"

    def serve_connection(connection: FrameSocket) -> None:
        adds_special = receive_frame(connection) == b"1"
        text = receive_frame(connection).decode()
        # The event loop and the engine share these cores.
        os.nice(NICENESS)
        limit_memory(BYTES + BYTES_PER_CHARACTER * len(text))
        with bounded_work(CPU_SECONDS + CPU_SECONDS_PER_CHARACTER * len(text), connection):
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
            ids = array("I", encoding.ids).tobytes()
        send_frame(connection, ids)

    return serve_connection
