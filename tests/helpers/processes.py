"""Processes that tests look at, by /proc."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def children(pid: int) -> list[int]:
    """The processes that this one started and that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def command_of(pid: int) -> bytes:
    """Return the command line of a process; nothing if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def engine_of(server: int) -> int:
    """The process of a server's engine; others encode long texts and images."""
    [engine] = [child for child in children(server) if b"engine_process" in command_of(child)]
    return engine


def cpu_seconds(pid: int) -> float:
    """The processor time of a process and of those that it started, which other work on the machine hardly changes."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


def soon(holds: Callable[[], object], seconds: float = 300.0) -> bool:
    """Whether it comes to hold."""
    end = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(found)
