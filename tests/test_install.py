"""Which copy of the code runs, with the package installed or not, from several working directories."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEPENDENCIES = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
SCRIPTS = {
    "train/train_drafter.py": "train",
    "train/regenerate.py": "regenerate",
    "train/evaluate.py": "evaluate",
    "convert/convert_checkpoint.py": "convert",
    "convert/info.py": "info",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Return a copy of the checkout, which pip may build in."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("redrafter", "train", "convert"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory) -> Path:
    """Return the directory that `pip install .` installed the package into."""
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


@pytest.mark.variant  # installs the package
def test_all_of_the_package_comes_from_the_current_folder_or_all_from_the_install(checkout, installed, tmp_path):
    for cwd, path, root in (
        (checkout, (installed,), checkout),
        (checkout, (), checkout),
        (tmp_path, (installed,), installed),
        (tmp_path, (checkout,), checkout),
    ):
        names = ["redrafter.engine.redrafter", "redrafter.convert.config", "redrafter.train", "redrafter.data.rows"]
        done = python("-c", WHERE, *names, cwd=cwd, path=path)
        assert done.returncode == 0, done.stderr
        files = ("engine/redrafter.py", "convert/config.py", "train/__init__.py", "data/rows.py")
        assert [Path(line) for line in done.stdout.split()] == [root / "redrafter" / name for name in files]


@pytest.mark.slow
def test_commands_run_from_a_checkout_however_it_is_installed(checkout, installed):
    done = python("-m", "redrafter", "info", checkout / "redrafter" / "boxed", cwd=checkout, path=(installed,))
    assert done.returncode == 0, done.stderr
    assert "Llama" in done.stdout
    done = python("-m", "redrafter", "convert", "--help", cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert "--drafter-model-dir" in done.stdout


@pytest.mark.variant  # installs the package
@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=() if name.startswith("convert/conv") else pytest.mark.slow) for name in SCRIPTS],
)
@pytest.mark.parametrize("other", ["nothing", pytest.param("another copy", marks=pytest.mark.slow)])
def test_a_launcher_runs_the_code_of_its_own_checkout(checkout, installed, tmp_path, script, other):
    path = () if other == "nothing" else (installed,)
    shown = python("-v", checkout / script, "--help", cwd=tmp_path, path=path)
    assert shown.returncode == 0, shown.stderr
    assert f"usage: redrafter {SCRIPTS[script]}" in shown.stdout
    assert f"{checkout}/redrafter/cli/__init__.py" in shown.stderr
    assert str(installed) not in shown.stderr


def test_a_launcher_names_a_missing_dependency(checkout, tmp_path):
    environment = os.environ | {"PYTHONPATH": ""}
    command = [sys.executable, "-S", str(checkout / "train" / "train_drafter.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "is not installed; type: pip install . in a checkout of redrafter" in done.stderr


def test_no_page_and_no_message_says_to_install_a_name_that_nobody_holds():
    """The package is on no index: a stranger could register its name there."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    named = re.compile(r"pip install.*(redrafter\[|install ['\"]?redrafter\b)")
    for file in filter(Path.is_file, (*pages, *(ROOT / "redrafter").rglob("*.py"))):
        assert not named.search(file.read_text(encoding="utf-8", errors="ignore")), file


def test_the_pythons_of_the_classifiers_are_those_that_ci_tests_and_the_lowest_one_is_required():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert named == sorted(named, key=lambda version: int(version.split(".")[1]))
    assert f'requires-python = ">={named[0]}"' in project
    assert f'python_version = "{named[0]}"' in project  # what mypy checks
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if workflow.exists():  # not in a source distribution
        assert f"python: {json.dumps(named)}" in workflow.read_text(encoding="utf-8")


@pytest.mark.variant  # builds one
def test_a_source_distribution_holds_the_tests_and_what_they_read(tmp_path):
    left_out = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")
    checkout = shutil.copytree(ROOT, tmp_path / "checkout", ignore=left_out)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = ("convert", "docs", "examples", "redrafter", "tests", "train")
    files = {path.relative_to(checkout) for name in folders for path in (checkout / name).rglob("*") if path.is_file()}
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert not files - held
