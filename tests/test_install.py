"""Which code runs, by what is installed and from where: an editable install, a plain one, or none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEPENDENCIES = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
SCRIPTS = {
    "train/train_drafter.py": "redrafter.train.train_drafter",
    "train/regenerate/command.py": "redrafter.train.regenerate.command",
    "train/evaluate/command.py": "redrafter.train.evaluate.command",
    "convert/convert_checkpoint.py": "redrafter.convert.convert_checkpoint",
    "convert/info.py": "redrafter.convert.info",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy, which pip may build in."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("redrafter", "train", "convert"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory) -> Path:
    """Where `pip install .` put the package."""
    site = tmp_path_factory.mktemp("site")
    words = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(site),
        str(checkout),
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def python(*words: object, cwd: Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess:
    """Run an interpreter that has this one's dependencies and, of the package itself, only what is on `path`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, *DEPENDENCIES)))}
    command = [sys.executable, "-S", *map(str, words)]  # -S: an editable install is not looked at
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


WHERE = """
import sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    print(find_spec(name).origin)
"""


def test_all_of_the_package_comes_from_the_current_folder_or_all_from_the_install(checkout, installed, tmp_path):
    for cwd, path, root in (
        (checkout, (installed,), checkout),
        (checkout, (), checkout),
        (tmp_path, (installed,), installed / "redrafter"),
        (tmp_path, (checkout,), checkout),
    ):
        names = ["redrafter.redrafter", "redrafter.convert.config", "redrafter.train", "redrafter.train.data.rows"]
        done = python("-c", WHERE, *names, cwd=cwd, path=path)
        assert done.returncode == 0, done.stderr
        module, *inner = (Path(line) for line in done.stdout.split())
        assert module in (root / "redrafter.py", root / "redrafter" / "redrafter.py")
        assert inner == [root / name for name in ("convert/config.py", "train/__init__.py", "train/data/rows.py")]


def test_commands_run_from_a_checkout_however_it_is_installed(checkout, installed):
    done = python("-m", "redrafter", "info", checkout / "redrafter" / "boxed", cwd=checkout, path=(installed,))
    assert done.returncode == 0 and "Llama" in done.stdout, done.stderr
    done = python("-m", "redrafter", "convert", "--help", cwd=checkout)
    assert done.returncode == 0 and "--drafter-model-dir" in done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_checkout_runs_that_checkouts_code_or_says_what_to_type(checkout, installed, tmp_path, script):
    def refused(path: tuple[Path, ...]) -> str:
        done = python(checkout / script, "--help", cwd=tmp_path, path=path)
        assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    expected = "redrafter: error: redrafter is not installed; type: pip install -e . in its checkout\n"
    assert refused(()) == expected
    said = refused((installed,))
    assert f"{checkout / script} would run what is installed in {installed / 'redrafter'}; " in said
    assert f"type: pip install -e {checkout} (or run what is installed: python -m {SCRIPTS[script]})" in said


def test_a_script_runs_where_it_is_what_is_installed(checkout, installed, tmp_path):
    for script, path in (
        (checkout / "convert" / "info.py", checkout),  # what an editable install does
        (installed / "redrafter" / "convert" / "info.py", installed),
    ):
        done = python(script, "--help", cwd=tmp_path, path=(path,))
        assert done.returncode == 0 and "usage: redrafter info" in done.stdout, done.stderr
