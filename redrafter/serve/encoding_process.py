"""The process that encodes one long text. Its priority is low, so that those who wait for tokens keep their pace.

`redrafter.sandbox.child` forks it. It imports nothing but tokenizers, and ends where its limits of time and memory are.
"""

import os
import socket
from array import array
from collections.abc import Callable

from tokenizers import Tokenizer

from redrafter.sandbox.child import bounded_work, limit_memory
from redrafter.sandbox.frames import receive_frame, send_frame

NICENESS = 10  # a tenth of the share of a process of the usual priority
# Two megabytes of short words, some of which are special tokens, take 2.5 s and 700 MB.
CPU_SECONDS, CPU_SECONDS_PER_CHARACTER = 2.0, 2e-5
BYTES, BYTES_PER_CHARACTER = 64 << 20, 1 << 10


def prepare(spec: bytearray, options: bytearray) -> Callable[[socket.socket], None]:
    """Load a tokenizer, and return what a process does with its connection.

    `spec` is the tokenizer as JSON; `options` is `1` if it encodes special tokens as text, else `0`. The process
    receives `1` if special tokens are added, else `0`, and the text, and sends its token ids as native uint32.
    """
    tokenizer = Tokenizer.from_str(spec.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = options == b"1"

    def run(connection: socket.socket) -> None:
        adds_special = receive_frame(connection) == b"1"
        text = receive_frame(connection).decode()
        os.nice(NICENESS)
        limit_memory(BYTES + BYTES_PER_CHARACTER * len(text))
        with bounded_work(CPU_SECONDS + CPU_SECONDS_PER_CHARACTER * len(text), connection):
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
            ids = array("I", encoding.ids).tobytes()
        send_frame(connection, ids)

    return run
