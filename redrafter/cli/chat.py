"""`redrafter chat`: chat with a model on the command line."""

import argparse
import contextlib
import sys

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
    chat = _Chat(pair, options, args.system, use_color(args.color, sys.stdout))
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
        if line.startswith("/") and len(line.split()) == 1:
            chat.command(line)
        elif line:
            try:
                chat.answer(line)
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
            ids = self._encoder.encode(self._messages(question))
            if not self.turns or self._context is None or len(ids) + self._answer_tokens <= self._context:
                return ids, before - len(self.turns)
            del self.turns[0]

    def _messages(self, question: str) -> list[dict[str, str]]:
        messages = list(self._head)
        for asked, answered in self.turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]


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


class _Chat:
    """A chat with a loaded pair: its history, its totals, and how answers are printed."""

    def __init__(self, pair: Pair, options: GenerationOptions, system: str | None, color: bool):
        self._pair, self._options, self._color = pair, options, color
        self._encoder = ChatEncoder(pair)
        self._history = History(self._encoder, system, pair.engine.target.context, options.max_new_tokens)
        self._runs: list[Run] = []

    def command(self, line: str) -> None:
        """Run a line that begins with a slash."""
        if line == "/reset":
            self._history.turns.clear()
            print("the talk so far is forgotten", file=sys.stderr)
        elif line == "/stats":
            print(_totals(self._runs), file=sys.stderr)
        else:
            print(f"there is no {line}; there are {', '.join(COMMANDS)}", file=sys.stderr)

    def answer(self, question: str) -> None:
        """Print the answer to a question, and remember as much of it as was printed before an interrupt."""
        ids, forgotten = self._history.prompt(question)
        if forgotten:
            what = "turn is" if forgotten == 1 else f"{forgotten} turns are"
            print(f"(the context is full: the oldest {what} forgotten)", file=sys.stderr)
        printer = Printer(self._pair.tokenizer, [None], sys.stdout, color=self._color)
        ends = [*self._encoder.eos, *self._options.stop_token_ids]
        try:
            self._runs.append(self._pair.run([ids], self._options, streamer=printer, eos_token_id=ends))
        except KeyboardInterrupt:
            printer.end()
            if not printer.texts[0]:
                return
        self._history.turns.append((question, printer.texts[0]))
