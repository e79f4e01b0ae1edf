"""Commands as programs: exit codes, and what ranks of torchrun print."""

import pytest

from redrafter.app import program
from redrafter.app.program import run_command, run_rank
from redrafter.errors import ArgumentError

LOST = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.fixture
def second_of_two(monkeypatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program, "SILENT_SECONDS", 0.0)


def fail(error: Exception) -> int:
    raise error


def test_a_peer_that_is_lost_is_one_line(second_of_two, capsys):
    assert run_command(lambda: fail(LOST)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("redrafter: error: another process has ended")
    with pytest.raises(RuntimeError, match="shapes"):
        run_command(lambda: fail(RuntimeError("the shapes differ")))


def test_in_one_process_nobody_is_lost(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="closed by peer"):
        run_command(lambda: fail(LOST))


def test_another_rank_prints_nothing_but_errors(second_of_two, capfd):
    def write(then: BaseException) -> int:
        print("Once upon a time")
        raise then

    assert run_rank("generate", lambda: run_command(lambda: write(KeyboardInterrupt()))) == 130
    assert capfd.readouterr() == ("", "")
    assert run_rank("generate", lambda: run_command(lambda: write(ArgumentError("no such flag")))) == 2
    assert capfd.readouterr() == ("", "redrafter: rank 1: error: no such flag\n")
