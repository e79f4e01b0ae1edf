"""The unit of systemd and the Dockerfile name what there is."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from redrafter.app.flags import read_options
from redrafter.app.options import LoadOptions
from redrafter.serve.command import build_parser
from redrafter.serve.config import ServeOptions, read_config

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "examples" / "server"
UNIT = (SERVER / "redrafter.service").read_text()


def test_the_unit_starts_a_server_that_ends_before_it_is_killed():
    [command] = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    program, serve, *words = shlex.split(command)
    options = read_options(ServeOptions, build_parser().parse_args(words))
    assert (program.rsplit("/", 1)[1], serve) == ("redrafter", "serve")
    assert options.api_key_file == "%d/keys"
    assert options.log_format == "json"
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(seconds) >= options.drain_timeout + 10


def test_the_options_of_the_readme_are_options(tmp_path):
    [text] = re.findall(r"<<< '(\{.*\})'", (SERVER / "README.md").read_text())
    (tmp_path / "serve.json").write_text(text)
    assert read_config([str(tmp_path / "serve.json")], (ServeOptions, LoadOptions))["max_batch_size"] == 32


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
