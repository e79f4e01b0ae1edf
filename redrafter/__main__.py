"""Run the `redrafter` command with `python -m redrafter`."""

from redrafter.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
