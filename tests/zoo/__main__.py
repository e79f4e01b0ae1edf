"""Check every architecture, a line for each; end with 1 when one writes another text or fails."""

import argparse
import sys
from pathlib import Path

from .report import counts, line, table
from .variants import architectures
from .workers import check_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", default=architectures(), help="these model types alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds for one architecture (default: %(default)s)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write a table to this file")
    args = parser.parse_args()
    if unknown := sorted(set(args.only) - set(architectures())):
        parser.error(f"transformers registers no causal LM of type {', '.join(unknown)}")
    found = []
    for model_type, outcomes in check_all(args.only, args.jobs, args.timeout):
        print(line(model_type, outcomes), flush=True)
        found.append((model_type, outcomes))
    print(counts(found))
    if args.markdown:
        args.markdown.write_text(f"{table(found)}\n{counts(found)}\n")
    return int(any(outcome.failed for _, outcomes in found for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
