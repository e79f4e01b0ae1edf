"""Files of options for a server, and the examples, which name what there is."""

import json
import re
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from helpers.command_line import fails
from redrafter.cli import main
from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions

pytest.importorskip("fastapi")

from redrafter.app.flags import read_options
from redrafter.serve.command import build_parser


def printed(capsys, *words: str) -> dict:
    assert main(["serve", "--print-config", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_flags_win_over_files_and_later_files_over_earlier(capsys, tmp_path):
    for name, text in (
        ("a.json5", "{max_batch_size: 3, port: 9, model: 'mine', // a note\n}"),
        ("b.json", '{"port": 10}'),
    ):
        (tmp_path / name).write_text(text)
    files = ["--config", str(tmp_path / "a.json5"), "--config", str(tmp_path / "b.json")]
    options = printed(capsys, *files)
    assert (options["max_batch_size"], options["port"], options["model"]) == (3, 10, "mine")
    assert printed(capsys, *files, "--max-batch-size", "5", "other")["max_batch_size"] == 5
    assert printed(capsys, *files, "other")["model"] == "other"


def test_every_option_may_stand_in_a_file(capsys, tmp_path):
    whole = printed(capsys)
    (tmp_path / "all.json").write_text(json.dumps(whole))
    assert printed(capsys, "--config", str(tmp_path / "all.json")) == whole


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "must hold a JSON object, got a list"),
        ("{", "neither JSON nor JSON5"),
        ('{"runtime": {"max_batch_size": 3}}', "c.json: runtime is not an option of this command"),
        ('{"max_batch_sise": 3}', "max_batch_sise is not an option of this command; did you mean max_batch_size?"),
        ('{"no-speculate": true}', 'no-speculate is not an option of this command; write "speculate": false'),
        ('{"dtype": "int8"}', "c.json: dtype: invalid choice: 'int8'"),
        ('{"port": 70000}', "--port must be from 0"),
    ],
)
def test_mistakes_name_the_file_or_the_flag(text, says, capsys, tmp_path):
    (tmp_path / "c.json").write_text(text)
    assert says in fails(capsys, "serve", "--print-config", "--config", str(tmp_path / "c.json"))


def test_nothing_is_said_of_a_file_that_is_right(tmp_path):
    (tmp_path / "c.json").write_text('{"host": "0.0.0.0", "max-queue-size": 7}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_parser().read_config(str(tmp_path / "c.json")) == {"host": "0.0.0.0", "max_queue_size": 7}
    with pytest.raises(ArgumentError):
        build_parser().read_config(str(tmp_path))


ROOT = Path(__file__).parents[2]
SERVER = ROOT / "examples" / "server"
UNIT = (SERVER / "redrafter.service").read_text()


def test_the_unit_starts_a_server_that_ends_before_it_is_killed(tmp_path):
    [command] = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    (tmp_path / "serve.json").write_text("{}")
    program, serve, *words = shlex.split(command.replace("/etc/redrafter", str(tmp_path)))
    options = read_options(ServeOptions, build_parser().parse_args(words))
    assert (program.rsplit("/", 1)[1], serve) == ("redrafter", "serve")
    assert options.api_key_file == "%d/keys"
    assert options.log_format == "json"
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(seconds) >= options.drain_timeout + 10


def test_the_options_of_the_readme_are_options(tmp_path):
    [text] = re.findall(r"<<< '(\{.*\})'", (SERVER / "README.md").read_text())
    (tmp_path / "serve.json").write_text(text)
    assert build_parser().read_config(str(tmp_path / "serve.json"))["max_batch_size"] == 32


def test_the_dockerfile_copies_what_there_is():
    text = (SERVER / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert len(sources) == 7
    assert all((ROOT / source).exists() for source in sources)
    needed = re.findall(r'= "(convert|train)[/"]', (ROOT / "pyproject.toml").read_text())
    assert set(needed) <= set(sources)
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert read_options(ServeOptions, build_parser().parse_args(json.loads(entry)[2:])).host == "0.0.0.0"


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd")
    (tmp_path / "redrafter.service").write_text(UNIT.replace("/opt/redrafter/bin/redrafter", "/bin/true"))
    run = subprocess.run(["systemd-analyze", "verify", tmp_path / "redrafter.service"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "redrafter.service" not in run.stderr, run.stderr
