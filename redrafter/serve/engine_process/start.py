"""Start the engine's process, and end it."""

import os
import signal
import socket
import subprocess
import sys

from redrafter.errors import ReDrafterError
from redrafter.serve.engine_process.channel import Channel
from redrafter.serve.engine_process.loading import EngineFacts, LoadEngine, LoadFailed

__all__ = ["EngineEndedError", "EngineProcess"]

# A fresh interpreter, since CUDA does not survive a fork. Ctrl-C is for the server, also before the modules are there;
# these are found on this program's path and not in its working directory.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[2:]; "
    "from redrafter.serve.engine_process.process import main; main(int(sys.argv[1]))"
)
END_SECONDS = 5.0  # seconds that it has to end in once the line is closed


class EngineEndedError(ReDrafterError):
    """The engine's process has ended by itself."""


class EngineProcess:
    """The engine's process, which ends once the line to it is closed, and so with this process at the latest.

    Attributes:
        channel: The line to it.
    """

    def __init__(self, request: LoadEngine) -> None:
        """Start the process. request: what to load."""
        ours, theirs = socket.socketpair()
        with theirs:
            path = (entry or os.getcwd() for entry in sys.path)
            words = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *path]
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.channel = Channel(ours)
        self.channel.send(request)

    def wait_until_loaded(self) -> EngineFacts:
        """Wait until the engine is loaded, and return what it says of itself.

        Raises:
            ReDrafterError: The engine cannot be loaded.
        """
        try:
            answer: EngineFacts | LoadFailed = self.channel.receive()
        except EOFError:
            raise EngineEndedError(f"{self.describe_end()}: nothing is served") from None
        if isinstance(answer, LoadFailed):
            raise answer.error
        return answer

    def end(self) -> None:
        """Wait until the process has ended, once the line is closed, and end it by force if it does not."""
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close the line, and end the process at once if it has not ended."""
        self.channel.close()
        self._process.kill()
        self._process.wait()

    def describe_end(self) -> str:
        """Wait until the process, whose end of the line is closed, has ended by itself, and return how."""
        try:
            code = self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the engine has failed, and its process does not end"
        if code < 0:
            name = signal.Signals(-code).name
            hint = ", as the system ends one that takes too much memory" if -code == signal.SIGKILL else ""
            return f"the engine's process was ended by {name}{hint}"
        return f"the engine's process ended with code {code}"
