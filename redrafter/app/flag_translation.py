"""Command lines with flags of other programs and commands, rewritten with the options of the command."""

from collections.abc import Callable, Sequence

from redrafter.app.foreign_flags import (
    FLAGS,
    Alias,
    CommandParser,
    FlagMeaning,
    Noted,
    Positional,
    Refused,
)

__all__ = ["find_meaning", "flag_owner", "translate"]

ALL_WORDS = 1 << 20  # for a flag that takes all words up to the next flag


def find_meaning(word: str, parser: CommandParser) -> FlagMeaning | None:
    """Return what a flag of another program or command means to a command.

    Args:
        word: A word of a command line, with or without `=value`.
        parser: The parser of the command.

    Returns:
        None when the command has an option of that name itself, or the table has no meaning for the command.
    """
    if parser.has_option(word.partition("=")[0]):
        return None
    owner = flag_owner(word)
    meanings = () if owner is None else FLAGS[owner][_table_name(word)]
    return next((meaning for meaning in meanings if meaning.fits(parser)), None)


def flag_owner(word: str) -> str | None:
    """Return whose flag a word of a command line is, with or without `=value`; None if the table does not have it."""
    return next((owner for owner, flags in FLAGS.items() if _table_name(word) in flags), None)


def translate(args: Sequence[str], parser: CommandParser, note: Callable[[str], object]) -> list[str]:
    """Replace flags of other programs by options of the command; end the program by `parser.error` for a refused one.

    Args:
        args: Words of the command line.
        parser: The parser of the command.
        note: Gets a message for each flag that is accepted and not needed.

    Returns:
        The words of the new command line.
    """
    translated, words = list[str](), list(args)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*translated, word, *words]
        name, equals, value = word.partition("=")
        meaning = find_meaning(word, parser)
        if meaning is None:
            translated.append(word)
            continue
        if isinstance(meaning, Refused):
            parser.error(f"{name} is {flag_owner(name)}'s; here: {meaning.instead}")
        most = _max_words(meaning, parser)
        values = [value] if equals else _words_before_next_flag(words)[:most]
        if equals and not most:
            parser.error(f"{name} is a switch and takes no value, got {value!r}")
        if most and not values:
            parser.error(f"argument {name}: expected a value")
        if not equals:
            del words[: len(values)]
        if isinstance(meaning, Noted):
            note(f"{name} is {flag_owner(name)}'s; not needed here: {meaning.reason}")
        elif isinstance(meaning, Positional):
            translated += values
        elif meaning.value is not None:
            translated.append(f"{meaning.option}={meaning.value}")
        elif not values:
            translated.append(meaning.option)
        else:
            translated += [f"{meaning.option}={value}" for value in values]
    return translated


def _table_name(word: str) -> str:
    """Return a flag as the table spells it: without `=value`, with dashes for underscores."""
    return word.partition("=")[0].replace("_", "-")


def _words_before_next_flag(words: Sequence[str]) -> list[str]:
    ends = (index for index, word in enumerate(words) if word.startswith("-") and " " not in word)
    return list(words[: next(ends, len(words))])


def _max_words(meaning: Noted | Positional | Alias, parser: CommandParser) -> int:
    """Return how many of the words after a flag belong to it at most."""
    if isinstance(meaning, Noted):
        return meaning.word_count
    if isinstance(meaning, Positional):
        return ALL_WORDS
    if meaning.value is not None or not parser.takes_value(meaning.option):
        return 0
    return ALL_WORDS if meaning.repeated else 1
