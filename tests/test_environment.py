"""docs/environment.md names every environment variable that the package reads or sets, and no other as its own."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "environment.md"
METHODS = ("get", "setdefault", "pop")


def is_environment(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ"


def keys_of(node: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    """Yield the expressions by which a node names variables, each with the number of `os.environ` that it covers."""
    match node:
        case ast.Subscript(value=value, slice=key) if is_environment(value):
            yield key, 1
        case ast.Compare(left=key, comparators=[value]) if is_environment(value):
            yield key, 1
        case ast.BinOp(left=value, right=key) if is_environment(value):
            yield key, 1
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[key, *_]) if is_environment(value):
            assert name in METHODS, ast.unparse(node)
            yield key, 1
        case ast.Call(func=ast.Name("map"), args=[ast.Attribute(value=value), key]) if is_environment(value):
            yield key, 1
        case ast.comprehension(target=ast.Name(), iter=value, ifs=[ast.Call(args=[ast.Constant(prefix)])]) if (
            is_environment(value)
        ):
            yield ast.Constant(f"{prefix}*"), 1
        case ast.comprehension(iter=ast.Call(func=ast.Attribute(value=value)), ifs=[ast.Call(args=[prefixes])]) if (
            is_environment(value)
        ):
            yield ast.Starred(prefixes), 1


def variables_of(file: Path) -> set[str]:
    """Return the names of the variables that a module reads or sets. Fails for a use that is not understood."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    loops = {
        node.target.elts[0].id: node.iter.func.value
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.Call)
        if isinstance(node.iter.func, ast.Attribute) and isinstance(node.target.elts[0], ast.Name)
    }
    used, found = 0, set()
    for key, count in (each for node in ast.walk(tree) for each in keys_of(node)):
        used += count
        prefixes = isinstance(key, ast.Starred)
        key = key.value if isinstance(key, ast.Starred) else key
        if isinstance(key, ast.Name):
            module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
            value = getattr(module, getattr(loops.get(key.id, key), "id", ""))
        else:
            value = ast.literal_eval(key)
        found |= {f"{name}*" if prefixes else name for name in ([value] if isinstance(value, str) else value)}
    assert used == sum(map(is_environment, ast.walk(tree))), f"{file}: a use of os.environ is not understood here"
    assert not re.search(r"os\.getenv|from os import", file.read_text(encoding="utf-8")), f"{file}: write os.environ"
    return found


def test_the_page_names_each_variable_that_the_package_reads_and_no_other_as_its_own():
    files = [file for file in (ROOT / "redrafter").rglob("*.py") if re.search(r"\benviron\b|getenv", file.read_text())]
    read = set().union(*map(variables_of, files))
    own, _, others = PAGE.read_text(encoding="utf-8").partition("## What other libraries read")
    named = {name for name in re.findall(r"`([A-Z][A-Z_]+\*?)`", own)}
    assert {"REDRAFTER_HOME", "OTEL_*", "ACCELERATE_USE_FSDP", "RUST_BACKTRACE"} <= read
    assert named == read
    assert not read & set(re.findall(r"`([A-Z][A-Z_]+)`", others))
