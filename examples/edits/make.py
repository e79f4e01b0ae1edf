"""Make prompts that ask for a function again with a small edit, as an editing assistant sees them.

python examples/edits/make.py --data corpus.jsonl.xz --out tests/data/edits.jsonl

Reads rows `{"source", "id", "split", "text"}` that are Python files, and takes their functions and methods of some
hundred characters that have a docstring. In turn, one gets another name, one another name of its first parameter, and
one another docstring. The edited function is the `completion` of the row that is written. The standard library is all
that this needs.
"""

import argparse
import ast
import json
import lzma
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

PROMPT = """{asked} in this function, and write all of it again.

```python
{code}
```

The whole function after the change:

```python
"""
FEWEST, MOST = 250, 1100  # characters of a function


def functions(text: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the functions of a file that are neither short nor long, each with its own text."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:  # a later Python than this one
        return
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and parameters(node):
            code = textwrap.dedent(" " * node.col_offset + (ast.get_source_segment(text, node) or ""))
            if FEWEST <= len(code) <= MOST:
                yield node, code


def parameters(node: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters, but for a method's own object."""
    return [argument.arg for argument in node.args.args if argument.arg != "self"]


def rename(code: str, old: str, new: str) -> str:
    """Return the code with one name in place of another, wherever it stands as a word."""
    return re.sub(rf"\b{re.escape(old)}\b", new, code)


def edits(node: ast.FunctionDef, code: str) -> list[tuple[str, str]]:
    """Return three edits of a function: what is asked for, and the edited function."""
    name, parameter = node.name, parameters(node)[0]
    lines, docstring, said = code.split("\n"), node.body[0], f"Return what {name} finds."
    before, after = docstring.lineno - node.lineno, (docstring.end_lineno or docstring.lineno) - node.lineno + 1
    return [
        (f"Rename `{name}` to `compute_{name}`", rename(code, name, f"compute_{name}")),
        (f"Rename the parameter `{parameter}` to `given`", rename(code, parameter, "given")),
        (f"Change the docstring to `{said}`", "\n".join([*lines[:before], f'    """{said}"""', *lines[after:]])),
    ]


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description="Make prompts that ask for a function again with a small edit.")
    parser.add_argument("--data", type=Path, required=True, help="rows in .jsonl or .jsonl.xz")
    parser.add_argument("--source", default="algorithms_python", help="source of the rows to read")
    parser.add_argument("--split", default="val", help="their split: one that nothing was trained on")
    parser.add_argument("--count", type=int, default=24, help="most prompts to make")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .jsonl")
    args = parser.parse_args()
    data = lzma.decompress(args.data.read_bytes()) if args.data.suffix == ".xz" else args.data.read_bytes()
    read = map(json.loads, data.splitlines())
    files = [row for row in read if (row["source"], row["split"]) == (args.source, args.split)]
    found = [(file["id"], node, code) for file in files for node, code in functions(file["text"])]
    rows = []
    for turn in range(3):  # each function is edited once before any is edited again
        for index, (file, node, code) in enumerate(found):
            asked, edited = edits(node, code)[(index + turn) % 3]
            row = {"source": args.source, "id": f"{file}:{node.name}", "split": args.split}
            rows.append(row | {"prompt": PROMPT.format(asked=asked, code=code), "completion": f"{edited}\n```\n"})
    with args.out.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows[: args.count])
    print(f"{len(rows[: args.count])} prompts of {len(found)} functions in {args.out}")


if __name__ == "__main__":
    main()
