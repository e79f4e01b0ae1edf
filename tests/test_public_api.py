"""The public names, the modules' own lists of names, and rules that all of a step's files obey."""

import ast
import pkgutil
import re
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import redrafter
from helpers.fake_ray import FakeRay

ROOT = Path(__file__).parent.parent
# Where the object and the argument say it: `change.apply(memory)`, `times.of(proposer, rows)`.
BARE_NAMES = {
    "apply": {"engine/changes.py", "scheduler/engine_change.py"},
    "of": set(),
    "read": set(),
    "run": set(),
}


def test_public_names_are_exactly_those_listed():
    assert sorted(redrafter.__all__) == [
        "ArgumentError",
        "CacheFullError",
        "CheckpointError",
        "DFlashConfig",
        "DFlashDrafter",
        "DraftTarget",
        "DrafterConfig",
        "EagleConfig",
        "EagleDrafter",
        "Engine",
        "EngineOptions",
        "GenerateOutput",
        "GenerateStats",
        "Grammar",
        "MismatchError",
        "NotFiniteError",
        "PromptLookup",
        "ReDrafter",
        "ReDrafterError",
        "ReDrafterWarning",
        "RecurrentDrafter",
        "Stats",
        "StepStreamer",
        "UnsupportedError",
        "__version__",
        "boxed_pair",
    ]
    for name in redrafter.__all__:
        value = getattr(redrafter, name)
        assert name == "__version__" or value.__doc__, f"{name} has no docstring"


def test_dir_lists_the_public_names_and_no_imports_of_the_module():
    assert {name for name in dir(redrafter) if not name.startswith("_")} == {*redrafter.__all__} - {"__version__"}


def definitions(*kinds: type[ast.AST]) -> dict[str, list[str]]:
    """Return the files that define each name, once per definition of one of these kinds of nodes."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted((ROOT / "redrafter").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                found[node.name].append(str(file.relative_to(ROOT / "redrafter")))
    return found


def test_no_two_public_classes_share_a_name():
    classes = definitions(ast.ClassDef)
    assert {name: files for name, files in classes.items() if len(files) > 1 and not name.startswith("_")} == {}


def test_functions_say_what_they_read_run_or_apply():
    functions = definitions(ast.FunctionDef, ast.AsyncFunctionDef)
    assert {name: set(functions[name]) for name in BARE_NAMES} == BARE_NAMES


def test_every_module_lists_its_names_and_they_exist(monkeypatch):
    if find_spec("ray") is None:
        FakeRay().install(monkeypatch)
    for module in pkgutil.walk_packages(redrafter.__path__, "redrafter."):
        if module.name.endswith(("__main__", ".version")):
            continue
        loaded = import_module(module.name)
        assert loaded.__doc__, module.name
        for name in getattr(loaded, "__all__", []):
            assert hasattr(loaded, name), f"{module.name}.{name}"


def test_the_changelog_has_a_section_of_the_version_which_is_dated_once_it_is_released():
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    if ".dev" in redrafter.__version__:
        assert newest == "Unreleased"
    else:
        assert re.fullmatch(rf"{re.escape(redrafter.__version__)} - \d{{4}}-\d\d-\d\d", newest)


def test_the_reference_shows_what_users_call_under_each_engine():
    pytest.importorskip("mkdocs")
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    parts = hooks.python_reference().split("::: redrafter.")[1:]
    members = {
        part.split("\n")[0]: re.findall(r"\w+", part.partition("members: [")[2].partition("]")[0]) for part in parts
    }
    assert set(members) == {*redrafter.__all__} - {"__version__"}
    for name, shown in members.items():
        assert all(hasattr(getattr(redrafter, name), member) for member in shown), name
    for engine in ("ReDrafter", "DraftTarget", "PromptLookup"):
        assert {"from_pretrained", "generate"} <= {*members[engine]}
        assert not {"lend_to", "make_memory", "scheduler_for"} & {*members[engine]}
    assert "push_to_hub" in hooks.python_reference()


def test_nothing_in_a_step_waits_for_the_device_or_loops_over_rows():
    """Search the files that a step runs through, but for those that build caches and targets or run a user's code."""
    searched = ("tree/beam_search", "tree/token_tree", "tree/accept", "attention/mask", "drafting/drafter")
    searched += ("drafting/proposer", "drafting/eagle", "drafting/dflash")
    on_a_cpu = "int((score >= least).sum(dim=1).max())"  # a GPU's searches have no `least`
    for name in ("step", *searched, "sampling/noise", "sampling/sampler", "sampling/prefixes"):
        source = (ROOT / "redrafter" / f"{name}.py").read_text().replace(on_a_cpu, "")
        assert not re.search(r"\.item\(|\.tolist\(|\.cpu\(|\.nonzero\(|\bint\(|\bbool\(", source), name
