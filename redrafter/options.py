"""How an option is declared: a field of a dataclass, with what its flag says of it."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, **argument: Any) -> Any:
    """Declare a dataclass field that is also a command-line flag and a key of config files.

    Args:
        default: Default of the field and of the flag.
        help: What the field does, for the help of its flag. Where the field is true by default it begins with a verb,
            as the help of its flag `--no-...` is derived from it.
        argument: Further arguments of `ArgumentParser.add_argument`, such as `choices`, `metavar`, `type`, `required`;
            `path=True` for a flag that names a file or a directory; `names`, which of the checks of
            `redrafter.app.paths` its value gets; and `commands`, names of the commands that have the
            flag, where not all do.
    """
    return field(default=default, metadata={"help": help, **argument})
