"""Flags, keys and fields are honoured, noted or refused as docs/migration.md says."""

import io
import json
import re
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from redrafter.cli import build_parser
from redrafter.convert import config as convert_config
from redrafter.engine.arguments import read_arguments
from redrafter.errors import UnsupportedError
from redrafter.serve import command as serve_command
from redrafter.serve.config import ServeOptions, read_config
from redrafter.train import config as train_config

PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
SERVING = PAGE.with_name("serving.md")
OUTCOMES = ("honoured", "noted", "refused")


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
    (re.fullmatch(r".+ as `redrafter (\w+)`", under)[1], first.strip("`"), outcome)
    for under, first, outcome in rows()
    if first.startswith("`-")
]


def parse(command: str, words: list[str]) -> dict[str, Any]:
    """Return the options that a command's parser reads."""
    if command == "serve":
        return vars(serve_command.build_parser().parse_args(words))
    if command == "convert":
        return vars(convert_config.build_parser().parse_args(words))
    if command == "train":
        return vars(train_config.parse(["--model", "m", "--data", "d", "--output", "o", *words]))
    return vars(build_parser().parse_args([command, *words]))


@pytest.mark.parametrize(("command", "typed", "outcome"), FLAGS)
def test_flags_are_honoured_noted_or_refused_as_the_page_says(capsys, command, typed, outcome):
    words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', typed)]
    try:
        options = parse(command, words)
    except SystemExit as end:
        assert end.code == 2
        err = capsys.readouterr().err
        assert outcome == "refused", err
        assert re.search(r" is (TensorRT-LLM|llgtrt|vLLM|SGLang)'s; here: ", err)
        return
    err = capsys.readouterr().err
    assert outcome == ("noted" if "; not needed here: " in err else "honoured"), err
    assert (options == parse(command, [])) == (outcome == "noted")


def test_the_page_has_tables_for_all_programs():
    assert {command for command, _, _ in FLAGS} == {"convert", "generate", "compare", "serve", "train"}
    assert len(FLAGS) > 60


@pytest.mark.parametrize(("key", "outcome"), rows_below("Keys of `runtime.json`"))
def test_keys_are_honoured_or_noted_as_the_page_says(tmp_path, key, outcome):
    file, key = tmp_path / "runtime.json", key.strip("`")
    value = {"guaranteed_no_evict": True, "kv_cache_free_gpu_mem_fraction": 0.5}.get(key, key.startswith("enable") or 9)
    file.write_text(json.dumps({key: value}))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        options = read_config([str(file)], (ServeOptions, serve_command.LoadOptions))
    assert (len(warned), len(options)) == ((0, 1) if outcome == "honoured" else (1, 0))


@pytest.mark.parametrize(("names", "outcome"), rows_below("Fields of a request"))
def test_fields_are_taken_or_refused_as_the_page_says(names, outcome):
    protocol = pytest.importorskip("redrafter.serve.protocol.requests")
    for name in re.findall(r"`(\w+)`", names):
        assert (name in protocol.ChatRequest.model_fields) == (outcome == "honoured"), name
    assert protocol.ChatRequest.model_config["extra"] == "forbid"


def flags_for_vllm_users() -> list[str]:
    """Return the flags of ours that the section on vLLM names: those of its text, and of its table's second column."""
    section = SERVING.read_text(encoding="utf-8").partition("## From vLLM\n")[2].partition("\n## ")[0]
    ours = [line.split(" | ")[-1] for line in section.splitlines()]
    return re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(ours).replace("--nproc-per-node", ""))


@pytest.mark.parametrize("flag", flags_for_vllm_users())
def test_flags_that_users_of_vllm_are_told_exist(flag):
    assert serve_command.build_parser().has_option(flag)


EXPECTED = "## What users of other programs expect"


def expectations() -> list[list[str]]:
    """Return the cells of each row of the table of expectations."""
    section = PAGE.read_text(encoding="utf-8").partition(f"{EXPECTED}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


def test_forty_expectations_are_answered_each_with_a_test_that_exists():
    rows = expectations()
    assert [int(row[0]) for row in rows] == list(range(1, 41))
    for number, *_, state, how, test in rows:
        assert state in ("yes", "partly", "no"), number
        assert state != "no" or "refused: " in how, number
        file, _, name = test.strip("`").partition("::")
        assert f"def {name}(" in (PAGE.parents[1] / "tests" / file).read_text(encoding="utf-8"), number


def test_no_entry_point_claims_to_be_a_plugin_of_sglang():
    assert '"sglang.srt.plugins"' not in (PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")


def refusal(typed: str) -> str:
    """Return the message with which a flag, a field of a request, a route or an argument of `generate` is refused."""
    if typed.startswith("--"):
        with redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
            serve_command.build_parser().parse_args(["my-base", typed])
        return err.getvalue()
    if typed.startswith("/"):
        return pytest.importorskip("redrafter.serve.routes.app").refused_paths()[typed]
    if typed.startswith("generate("):
        with pytest.raises(UnsupportedError) as error:
            read_arguments(eval(typed.replace("generate", "dict")))
        return str(error.value)
    protocol = pytest.importorskip("redrafter.serve.protocol.requests")
    fields = pytest.importorskip("redrafter.serve.protocol.fields")
    body = {"messages": [{"role": "user", "content": "Hello"}]} | json.loads(f"{{{typed}}}")
    with pytest.raises(ValueError) as error:  # pydantic's, which has errors()
        protocol.ChatRequest.model_validate(body)
    first = error.value.errors()[0]
    return f"{fields.field_path(first)} is not supported: {first['msg']}"


REFUSED = [(row[3].strip("`"), text) for row in expectations() for text in re.findall(r"refused: `(.*?)`", row[5])]


@pytest.mark.parametrize(("typed", "text"), REFUSED)
def test_a_refusal_reads_as_the_table_of_expectations_says(typed, text):
    assert text in refusal(typed)
