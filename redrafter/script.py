"""A file of a checkout that is run as a program, such as `python train/train_drafter.py`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import redrafter

__all__ = ["check_script"]


def check_script(file: str, module: str) -> None:
    """Exit with 2 and one line if what is installed is not the code that a script belongs to.

    A script imports the rest of its program from what is installed, which may be of another version.

    Args:
        file: the script's own `__file__`.
        module: the full name that the script has as a module, e.g. `redrafter.train.train_drafter`.
    """
    found = find_spec(module)
    if found is not None and os.path.realpath(str(found.origin)) == os.path.realpath(file):
        return
    checkout = Path(file).resolve().parents[module.count(".") - 1]
    print(
        f"redrafter: error: {file} would run what is installed in {Path(redrafter.__file__).parent}; type: "
        f"pip install -e {checkout} (or run what is installed: python -m {module})",
        file=sys.stderr,
    )
    sys.exit(2)
