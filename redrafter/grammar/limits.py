"""Limits of time and memory for one grammar. Strangers send grammars, and some take all that they are given."""

__all__ = [
    "COMPILE_CPU_SECONDS",
    "COMPILE_WAIT_SECONDS",
    "MASK_CPU_SECONDS",
    "MASK_CPU_SECONDS_PER_TOKEN",
    "MAX_EBNF_RULES",
    "MAX_GRAMMAR_CHARS",
    "MAX_LEXER_STATES",
    "MAX_PARSER_ITEMS",
    "MAX_PROCESS_BYTES",
    "MAX_SCHEMA_DEPTH",
    "STACK_BYTES",
    "step_cpu_seconds",
]

MAX_GRAMMAR_CHARS = 1 << 17  # characters of a grammar; of a schema, of the schema in JSON
MAX_SCHEMA_DEPTH = 128  # objects and lists within each other in a schema
MAX_EBNF_RULES = 1000  # of an EBNF grammar, whose reader takes time that grows with their square
MAX_PARSER_ITEMS = 20_000  # of the parser, for one mask; the time grows with their square, to 0.2 s
MAX_LEXER_STATES = 60_000  # of the lexer, about 1 kB each

MAX_PROCESS_BYTES = 1 << 30  # bytes that the process of one grammar may use, its stack included
STACK_BYTES = (
    256 << 20
)  # bytes of it for the stack; rules are followed by recursion, and MAX_GRAMMAR_CHARS has room for many
COMPILE_CPU_SECONDS = 10  # of a processor, for one compilation
COMPILE_WAIT_SECONDS = 60  # seconds of a clock, for one compilation on a machine that is busy

# Seconds of a processor that the masks of one text may take, and as many more for each of its tokens: rows beside it
# wait for them.
MASK_CPU_SECONDS, MASK_CPU_SECONDS_PER_TOKEN = 0.5, 0.05


def step_cpu_seconds(texts: int) -> float:
    """Seconds of a processor for one step of so many texts of one grammar, whatever they have saved."""
    return 2.0 + 0.1 * texts
