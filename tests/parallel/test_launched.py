"""A launcher's variables are read, and wrong ones are refused in one line that names them."""

import pytest

from redrafter import ArgumentError
from redrafter.cli import main
from redrafter.parallel.launched import launched_processes, local_rank, process_rank

LAUNCHED = {"LOCAL_RANK": "0", "RANK": "1", "WORLD_SIZE": "2"}


def launch(monkeypatch, **variables: str | None) -> None:
    """Set the variables of a launcher, changed as given; None leaves one out."""
    for name, value in (LAUNCHED | variables).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE must be a number of at least 1, got 'x'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a number of at least 1, got '0'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be a number of at least 1, got ''"),
        ({"RANK": None}, "RANK must be a number of at least 0 and less than WORLD_SIZE=2, got ''"),
        ({"RANK": "2"}, "RANK must be a number of at least 0 and less than WORLD_SIZE=2, got '2'"),
        ({"RANK": "-1"}, "RANK must be a number of at least 0 and less than WORLD_SIZE=2, got '-1'"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "train", "info"])
def test_a_wrong_environment_of_a_launcher_is_one_line_and_exit_code_2(monkeypatch, capsys, variables, says, command):
    launch(monkeypatch, **variables)
    assert main([command, "x"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"redrafter: error: the environment variable {says}: torchrun sets" in err


def test_a_local_rank_is_a_number(monkeypatch):
    launch(monkeypatch, LOCAL_RANK="one")
    with pytest.raises(ArgumentError, match="LOCAL_RANK must be a number of at least 0, got 'one'"):
        local_rank()


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (2, 1)),
        ({"LOCAL_RANK": None, "WORLD_SIZE": "x"}, (1, 0)),  # no launcher of ours: another program's variable
        ({"WORLD_SIZE": None, "RANK": None}, (1, 0)),
        ({"WORLD_SIZE": "1", "RANK": None}, (1, 0)),
    ],
)
def test_the_number_of_processes_and_of_this_one_are_read(monkeypatch, variables, found):
    launch(monkeypatch, **variables)
    assert (launched_processes(), process_rank()) == found
