"""`redrafter chat`: chat with a model on the command line."""

import argparse
import contextlib
import sys
from itertools import cycle

from redrafter.app.flags import read_options
from redrafter.app.loading import ChatEncoder, Pair
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.program import print_message
from redrafter.cli.printer import Printer, use_color
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.measure.run import Repeats, Run

COMMANDS = ("/exit", "/reset", "/stats")


def run(args: argparse.Namespace) -> int:
    """Run the command: answer each line of stdin until it ends or the user types /exit."""
    options = read_options(GenerationOptions, args)
    pair = Pair.load(read_options(LoadOptions, args), read_options(DraftOptions, args), options.speculate)
    encoder = ChatEncoder(pair)
    history = History(encoder, args.system, pair.engine.target.context, options.max_new_tokens)
    runs: list[Run] = []

    def answer(question: str) -> None:
        ids, forgotten = history.prompt(question)
        if forgotten:
            what = "turn is" if forgotten == 1 else f"{forgotten} turns are"
            print(f"(the context is full: the oldest {what} forgotten)", file=sys.stderr)
        printer = Printer(pair.tokenizer, [None], sys.stdout, color=use_color(args.color, sys.stdout))
        ends = [*encoder.eos, *options.stop_token_ids]
        try:
            runs.append(pair.run([ids], options, streamer=printer, eos_token_id=ends))
        except KeyboardInterrupt:  # what was printed before it is remembered
            printer.end()
            if not printer.texts[0]:
                return
        history.turns.append((question, printer.texts[0]))

    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives `input` a history and an editable line
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        except UnicodeError as error:
            raise ArgumentError(f"stdin is not UTF-8 text: {error}") from error
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D ends the talk)", file=sys.stderr)
            continue
        if line == "/exit":
            return 0
        if line == "/reset":
            history.turns.clear()
            print("the talk so far is forgotten", file=sys.stderr)
        elif line == "/stats":
            print(_totals(runs), file=sys.stderr)
        elif line.startswith("/") and len(line.split()) == 1:
            print(f"there is no {line}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        elif line:
            try:
                answer(line)
            except ReDrafterError as error:
                if not interactive:  # end with an exit code that a script sees
                    raise
                print_message("error", error)


class History:
    """The turns of a chat, each a question and its answer, of which the oldest are forgotten when the context is full.

    The context is the most tokens that the target can read, None for no limit; `answer_tokens` are kept free in it.
    """

    def __init__(self, encoder: ChatEncoder, system: str | None, context: int | None, answer_tokens: int):
        self._encoder, self._context = encoder, context
        self._answer_tokens = answer_tokens if context is None else min(answer_tokens, context // 2)
        self._head = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[tuple[str, str]] = []

    def prompt(self, question: str) -> tuple[list[int], int]:
        """Return the token ids of the chat with a new question, and how many old turns were forgotten for it."""
        before = len(self.turns)
        while True:
            texts = [text for turn in self.turns for text in turn] + [question]
            turns = zip(cycle(("user", "assistant")), texts, strict=False)
            ids = self._encoder.encode([*self._head, *({"role": role, "content": text} for role, text in turns)])
            if not self.turns or self._context is None or len(ids) + self._answer_tokens <= self._context:
                return ids, before - len(self.turns)
            del self.turns[0]


def _totals(runs: list[Run]) -> str:
    if not runs:
        return "no answers yet"
    answers = Repeats([runs])
    total, seconds, tokens = answers.stats, answers.seconds[0], sum(run.count for run in runs)
    shares = [f"{count / max(total.steps, 1):.2f}" for count in total.accepted_by_depth]
    return (
        f"{len(runs)} answers, {tokens} tokens in {seconds:.2f} s, "
        f"{tokens / seconds:.1f} tokens/s, {total.tokens_per_step:.2f} tokens per step"
        + (f"; share of steps that accepted 1, 2, ... drafts: {' '.join(shares)}" if shares else "")
    )
