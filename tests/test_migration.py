"""Flags, keys and fields are honoured or refused as docs/migration.md says."""

import re
from pathlib import Path
from typing import Any

import pytest

from redrafter.cli import measure_options
from redrafter.cli.commands import build_parser
from redrafter.convert import config as convert_config
from redrafter.serve import command as serve_command
from redrafter.train import config as train_config

PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
OUTCOMES = ("honoured", "refused")


def rows() -> list[tuple[str, str, str]]:
    """Return the heading, the first cell and the outcome of each table row of the page that ends with an outcome."""
    table_rows, heading = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and cells[-1] in OUTCOMES:
            table_rows.append((heading, cells[0], cells[-1]))
    return table_rows


def rows_below(heading: str) -> list[tuple[str, str]]:
    """Return the first cell and the outcome of each row below a heading."""
    return [(first, outcome) for under, first, outcome in rows() if under == heading]


FLAGS = [
    (re.fullmatch(r".+ as `redrafter (\w+)`", under)[1], typed, outcome)
    for under, first, outcome in rows()
    for typed in re.findall("`(-[^`]+)`", first)
]


def parse(command: str, words: list[str]) -> dict[str, Any]:
    """Return the options that a command's parser reads."""
    if command == "serve":
        return vars(serve_command.build_parser().parse_args(words))
    if command == "convert":
        return vars(convert_config.build_parser().parse_args(words))
    if command == "train":
        return vars(train_config.parse(["--model", "m", "--data", "d", "--output", "o", *words]))
    if command in measure_options.COMMANDS:
        return vars(measure_options.build_parser(command).parse_args(words))
    return vars(build_parser().parse_args([command, *words]))


@pytest.mark.parametrize(("command", "typed", "outcome"), FLAGS)
def test_flags_are_honoured_or_refused_as_the_page_says(capsys, command, typed, outcome):
    words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', typed)]
    try:
        options = parse(command, words)
    except SystemExit as end:
        assert end.code == 2
        err = capsys.readouterr().err
        assert outcome == "refused", err
        assert "docs/migration.md" in err
        return
    assert outcome == "honoured"
    assert options != parse(command, [])


def test_the_page_has_tables_for_all_programs():
    assert {command for command, _, _ in FLAGS} == {"convert", "generate", "compare", "serve"}
    assert len(FLAGS) > 40


@pytest.mark.parametrize(("names", "outcome"), rows_below("Fields of a request"))
def test_fields_are_taken_or_refused_as_the_page_says(names, outcome):
    protocol = pytest.importorskip("redrafter.serve.protocol.requests")
    for name in re.findall(r"`(\w+)`", names):
        assert (name in protocol.ChatRequest.model_fields) == (outcome == "honoured"), name
    assert protocol.ChatRequest.model_config["extra"] == "forbid"


def flags_here() -> list[str]:
    """Return the flags of ours in the table of other programs' flags."""
    section = PAGE.read_text(encoding="utf-8").partition("## Flags of vLLM")[2].partition("\n## ")[0]
    first = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    return re.findall(r"--[a-z][a-z-]+", " ".join(first))


def test_the_flags_of_ours_that_the_page_names_exist():
    parsers = [serve_command.build_parser(), train_config.build_parser(), *build_parser().commands.values()]
    assert len(flags_here()) > 15
    assert [flag for flag in flags_here() if not any(parser.has_option(flag) for parser in parsers)] == []
