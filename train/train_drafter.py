"""Run `redrafter train` from a checkout, with `python` or with `accelerate launch`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the code of this checkout, whatever is installed

from redrafter.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
