"""Limits of time and memory for one grammar. Strangers send grammars, and some take all that they are given."""

__all__ = [
    "COMPILE_SECONDS",
    "COMPILE_WAIT",
    "EACH",
    "MEMORY",
    "MOST_DEPTH",
    "MOST_ITEMS",
    "MOST_RULES",
    "MOST_STATES",
    "MOST_TEXT",
    "PATIENCE",
    "STACK",
    "patience",
]

MOST_TEXT = 1 << 17  # characters of a grammar; of a schema, of the schema in JSON
MOST_DEPTH = 128  # objects and lists within each other in a schema
MOST_RULES = 1000  # of an EBNF grammar, whose reader takes time that grows with their square
MOST_ITEMS = 20_000  # of the parser, for one mask; the time grows with their square, to 0.2 s
MOST_STATES = 60_000  # of the lexer, about 1 kB each

MEMORY = 1 << 30  # bytes that the process of one grammar may use, its stack included
STACK = 256 << 20  # bytes of it for the stack; rules are followed by recursion, and MOST_TEXT has room for many
COMPILE_SECONDS = 10  # of a processor, for one compilation
COMPILE_WAIT = 60  # seconds of a clock, for one compilation on a machine that is busy

# Seconds of a processor that the masks of one text may take, and as many more for each of its tokens: rows beside it
# wait for them.
PATIENCE, EACH = 0.5, 0.05


def patience(texts: int) -> float:
    """Seconds of a processor for one step of so many texts of one grammar, whatever they have saved."""
    return 2.0 + 0.1 * texts
