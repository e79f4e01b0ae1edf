"""What the README and the notebook show runs as it stands."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from redrafter import Engine, EngineOptions, __version__, boxed_pair
from redrafter.engine.arguments import read_arguments

ROOT = Path(__file__).parents[1]


def run(program: str, folder: Path) -> str:
    """Run a program in an empty folder. Returns what it printed."""
    file = folder / "program.py"
    file.write_text(program)
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, file], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def test_the_first_python_block_of_the_readme_runs_as_it_stands(tmp_path):
    # The pair in the package is in place of the model that `make chat` downloads, and of its drafter.
    for link, folder in (("build/smollm2", boxed_pair()), ("examples/smollm2/drafter", boxed_pair() / "drafter")):
        (tmp_path / link).parent.mkdir(parents=True)
        (tmp_path / link).symlink_to(folder)
        assert (ROOT / link).exists() or link.startswith("build/")
    assert run(python_blocks("README.md")[0], tmp_path).strip()


@pytest.mark.slow
def test_the_first_python_block_of_the_quickstart_runs_as_it_stands(tmp_path):
    assert run(python_blocks("docs/quickstart.md")[0], tmp_path).strip()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "examples" / "train_a_drafter.ipynb").read_text())["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "tokens per step" in run(program, tmp_path)


def test_generate_has_each_argument_of_the_readmes_table_and_no_option_of_engines_is_among_them():
    table = (ROOT / "README.md").read_text().split("| argument | meaning |\n")[1].split("\n\n")[0]
    cells = "".join(row.split("|")[1] for row in table.splitlines())
    named = set(re.findall(r"`(\w+)(?:=\w+)?`", cells))
    assert {"seed", "speculate", "grammar"} <= named
    read_arguments(dict.fromkeys(named - inspect.signature(Engine.generate).parameters.keys()))  # refuses any other
    assert not {item.name for item in fields(EngineOptions)} & set(re.findall(r"`(\w+)", table))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 125


def test_the_citation_names_this_version_and_the_licence_of_the_package():
    cited = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {re.escape(__version__)}$", cited, re.MULTILINE)
    assert re.search(r"^license: Apache-2\.0$", cited, re.MULTILINE)
    # A citation of a release gives its date, as the changelog does; between two releases there is none.
    dated = re.search(r"^date-released: (.+)$", cited, re.MULTILINE)
    if ".dev" in __version__:
        assert dated is None
    else:
        assert f"## {__version__} - {dated[1]}\n" in (ROOT / "CHANGELOG.md").read_text()
    for field in ("cff-version", "message", "title", "authors"):  # those that the format requires
        assert re.search(rf"^{field}:", cited, re.MULTILINE)
