"""`python -m redrafter` is the command `redrafter`."""

from redrafter.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
