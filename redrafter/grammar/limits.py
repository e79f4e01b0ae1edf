"""Limits of size, time and memory for one grammar, as a malicious one would take all that it gets."""

MAX_GRAMMAR_CHARS = 1 << 17  # characters; for a schema, of its JSON
MAX_EBNF_RULES = 1000  # the EBNF reader's time grows with their square
MAX_PARSER_ITEMS = 20_000  # for one mask; the time grows with their square, to 0.2 s
MAX_LEXER_STATES = 60_000  # about 1 kB each

MAX_PROCESS_BYTES = 1 << 30  # memory of one grammar's process, including its stack
STACK_BYTES = 256 << 20  # stack of that process; rules are followed by recursion, and may nest deeply
COMPILE_CPU_SECONDS = 10  # processor time of one compilation
COMPILE_WAIT_SECONDS = 60  # wall-clock time of one compilation, on a busy machine

# Processor time for the masks of one text: a fixed part, and a part for each token of the text. The other rows of the
# batch wait for them.
MASK_CPU_SECONDS = 0.5
MASK_CPU_SECONDS_PER_TOKEN = 0.05


def step_cpu_seconds(texts: int) -> float:
    """Return the processor time, in seconds, that one step of `texts` texts of a grammar may take."""
    return 2.0 + 0.1 * texts
