"""Which mutants of a file are run: a sample that stays nearly the same when other lines of the file change."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from cosmic_ray import plugins
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_item import WorkItem


@dataclass(frozen=True)
class Mutant:
    """A file with one fault.

    Attributes:
        item: The entry of Cosmic Ray's session.
        path: The file, from the root of the repository.
        line: Number of the line that the fault is in.
        code: That line without indentation, before the fault.
        fault: The same line with it.
        source: The source of the whole file.
    """

    item: WorkItem
    path: str
    line: int
    code: str
    fault: str
    source: str

    @property
    def name(self) -> str:
        """What identifies the mutant in the list of accepted ones, wherever its line moves."""
        return f"{self.code} -> {self.fault}"


def sample(path: str, items: list[WorkItem], count: int, seed: int) -> Iterator[Mutant]:
    """Yield `count` mutants of a file, each at another place of it.

    A mutant's rank is a checksum of its line and operator. Annotations and docstrings are left out, as nothing computes
    with them.
    """
    source = Path(path).read_text()
    lines, same, seen = source.splitlines(), computed(source), Counter[str]()
    ranked = []
    for item in sorted(items, key=lambda each: (each.mutations[0].operator_name, each.mutations[0].occurrence)):
        [mutation] = item.mutations
        name = f"{seed} {mutation.operator_name} {lines[mutation.start_pos[0] - 1].strip()}"
        seen[name] += 1
        ranked.append((crc32(f"{name} {seen[name]}".encode()), item))
    places = set[tuple[object, ...]]()
    for _, item in sorted(ranked, key=lambda each: each[0]):
        [mutation] = item.mutations
        place = mutation.start_pos, mutation.end_pos
        if place in places or len(places) == count:
            continue
        operator = plugins.get_operator(mutation.operator_name)()
        mutated = mutate_code(source, operator, mutation.occurrence)
        if mutated is None or computed(mutated) == same:
            continue
        places.add(place)
        after, line = mutated.splitlines(), mutation.start_pos[0]
        line = next((at for at, (a, b) in enumerate(zip(lines, after, strict=False), 1) if a != b), line)
        yield Mutant(item, path, line, lines[line - 1].strip(), after[line - 1].strip(), mutated)


def computed(source: str) -> str | None:
    """Return what a module computes, without annotations and docstrings; None where it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)
