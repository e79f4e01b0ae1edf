"""`redrafter completion`: print a script that completes commands, flags, choices and file names in bash or zsh."""

import argparse
from collections.abc import Iterator, Mapping

from redrafter.app.parser import Parser

# zsh runs bash completions through its bundled emulation, so one script serves both.
_SCRIPT = """{zsh}_redrafter() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  case "$COMP_CWORD,${{COMP_WORDS[1]}}" in
    1,*) words="{commands}" ;;
{cases}
  esac
  case "${{COMP_WORDS[1]}},${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [[ "$COMP_CWORD" -gt 1 && "$word" != -* ]]; then
    COMPREPLY+=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _redrafter redrafter
"""


def completion_script(shell: str, parsers: Mapping[str, Parser]) -> str:
    """Return the script for `bash` or `zsh`.

    Args:
        shell: The shell.
        parsers: The parser of each command, by name.
    """
    return _SCRIPT.format(
        zsh="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=" ".join(parsers),
        cases="\n".join(f'    *,{name}) words="{" ".join(_flags(parser))}" ;;' for name, parser in parsers.items()),
        choices="\n".join(line for name, parser in parsers.items() for line in _choices(name, parser)),
    )


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # noqa: SLF001  argparse has no public name of them


def _flags(parser: Parser) -> Iterator[str]:
    for action in _actions(parser):
        yield from (flag for flag in action.option_strings if flag.startswith("--"))


def _choices(command: str, parser: Parser) -> Iterator[str]:
    """Yield a case for each flag of a command that takes one of a few words, and one for the words of its argument."""
    for action in _actions(parser):
        if action.choices:
            flags = "|".join(f"{command},{flag}" for flag in action.option_strings) or f"{command},{command}"
            yield f'    {flags}) words="{" ".join(map(str, action.choices))}" ;;'
