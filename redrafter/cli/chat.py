"""`redrafter chat`: chat with a model on the command line."""

import argparse
import contextlib
import sys
from functools import partial
from itertools import cycle

from redrafter.app.flags import read_options
from redrafter.app.loading import ChatEncoder, Pair
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.program import print_message
from redrafter.cli.generate import compare_trial, warm_up
from redrafter.cli.printer import Printer, use_color
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.measure.decode import RepeatedRuns, Run
from redrafter.measure.record import drafts_left_out

COMMANDS = ("/exit", "/reset", "/stats")


def run_checked(args: argparse.Namespace) -> int:
    """Run the command: answer each line of stdin until it ends or the user types /exit."""
    options = read_options(GenerationOptions, args)
    if args.compare and not options.speculate:
        raise ArgumentError("--compare sets speculation against undrafted decoding: leave out --no-speculate")
    interactive = sys.stdin.isatty()
    if interactive:
        print("(loading the model)", file=sys.stderr)
    pair = Pair.load(read_options(LoadOptions, args), read_options(DraftOptions, args), options.speculate)
    encoder = ChatEncoder(pair)
    history = History(encoder, args.system, pair.engine.target.context, options.max_new_tokens)
    trial = pair.trial(options, eos_token_id=[*encoder.eos, *options.stop_token_ids])
    runs: list[Run] = []
    trial.ran.repeats.append(runs)
    batches: list[list[list[int]]] = []  # the prompt of each run

    def answer(question: str) -> None:
        ids, forgotten = history.prompt(question)
        if forgotten:
            what = "turn is" if forgotten == 1 else f"{forgotten} turns are"
            print(f"(the context is full: the oldest {what} forgotten)", file=sys.stderr)
        printer = Printer(pair.tokenizer, [None], sys.stdout, color=use_color(args.color, sys.stdout))
        try:
            runs.append(trial.run_batch([ids], len(runs), streamer=printer))
            batches.append([ids])
            if interactive:
                print(f"({runs[-1].count} tokens, {runs[-1].tokens_per_second:.1f} tokens/s)", file=sys.stderr)
        except KeyboardInterrupt:  # keep the printed part as the answer
            printer.end()
            print("(stopped)", file=sys.stderr)
            if not printer.texts[0]:
                return
        history.turns.append((question, printer.texts[0]))

    if args.compare:
        warm_up(trial, [history.prompt("Hello")[0]])
    if interactive:
        colored = options.speculate and use_color(args.color, sys.stdout)
        drafts = "; what was drafted is green" if colored else ""
        print(f"(type a question; Ctrl-D ends the talk{drafts})", file=sys.stderr)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives `input` a history and an editable line
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:  # the prompt stands on this line
                print(file=sys.stderr)
            break
        except UnicodeError as error:
            raise ArgumentError(f"stdin is not UTF-8 text: {error}") from error
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D ends the talk)", file=sys.stderr)
            continue
        if line == "/exit":
            break
        if line == "/reset":
            history.turns.clear()
            print("the talk so far is forgotten", file=sys.stderr)
        elif line == "/stats":
            print(_totals(runs, trial.mode), file=sys.stderr)
        elif line.startswith("/") and len(line.split()) == 1:
            print(f"there is no {line}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        elif line:
            try:
                answer(line)
            except ReDrafterError as error:
                if not interactive:  # end with an exit code that a script sees
                    raise
                print_message("error", error)
    if args.compare and runs:
        print("(decoding the same answers without drafts; Ctrl-C ends it)", file=sys.stderr)
        print(_totals(runs, trial.mode), file=sys.stderr)
        compare_trial(trial, batches, partial(Printer, pair.tokenizer, [None]))
    return 0


class History:
    """The turns of a chat, each a question and an answer; drops the oldest turns when the context is full.

    `context` is the maximum number of tokens, or None; `answer_tokens` of them are reserved for the answer.
    """

    def __init__(self, encoder: ChatEncoder, system: str | None, context: int | None, answer_tokens: int):
        self._encoder, self._context = encoder, context
        self._answer_tokens = answer_tokens if context is None else min(answer_tokens, context // 2)
        self._head = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[tuple[str, str]] = []

    def prompt(self, question: str) -> tuple[list[int], int]:
        """Return the token ids of the chat with a new question, and the number of old turns that were dropped."""
        before = len(self.turns)
        while True:
            texts = [text for turn in self.turns for text in turn] + [question]
            turns = zip(cycle(("user", "assistant")), texts, strict=False)
            ids = self._encoder.encode([*self._head, *({"role": role, "content": text} for role, text in turns)])
            if not self.turns or self._context is None or len(ids) + self._answer_tokens <= self._context:
                return ids, before - len(self.turns)
            # Drop whole turns: half of an exchange would confuse the model.
            del self.turns[0]


def _totals(runs: list[Run], mode: str) -> str:
    if not runs:
        return "no answers yet"
    answers = RepeatedRuns([runs])
    total, seconds, tokens = answers.stats, answers.seconds[0], sum(run.count for run in runs)
    shares = [f"{count / max(total.steps, 1):.2f}" for count in total.accepted_by_depth if count]
    return (
        f"{len(runs)} answer{'s' * (len(runs) != 1)}, {tokens} tokens in {seconds:.2f} s, "
        f"{tokens / seconds:.1f} tokens/s, {total.tokens_per_step:.2f} tokens per step"
        + (f"; share of steps that accepted 1, 2, ... drafts: {' '.join(shares)}" if shares else "")
        + drafts_left_out(total, mode)
    )
