"""`redrafter generate`: write on from prompts."""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redrafter.app.engines import shape
from redrafter.app.flags import read_options
from redrafter.app.loading import Pair, Template
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.cli.printer import Printer, use_color
from redrafter.engine.outputs import Stats
from redrafter.errors import ArgumentError
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.divergence import first_difference
from redrafter.measure.facts import versions
from redrafter.measure.run import Run

__all__ = ["run"]

WARM_UP = 8  # new tokens of the runs before a comparison, which pay for what only a first run pays
HEADING = 60  # characters of a prompt in the line above its text


def run(args: argparse.Namespace) -> int:
    """Read prompts, write on from them, say how fast."""
    options = read_options(GenerationOptions, args)
    if args.num_return_sequences < 1:
        raise ArgumentError(f"--num-return-sequences must be 1 or more, got {args.num_return_sequences}")
    if args.compare and not options.speculate:
        raise ArgumentError("--compare sets speculation against plain decoding: leave out --no-speculate")
    prompts = _read_prompts(args)
    if isinstance(options.temperature, tuple) and len(options.temperature) != len(prompts):
        raise ArgumentError(
            f"--temperature has {len(options.temperature)} values for {len(prompts)} prompts: give one, or one for each"
        )
    job = _Job(args, options, prompts)
    if args.compare:
        short = replace(options, max_new_tokens=min(WARM_UP, options.max_new_tokens))
        job.decode(short, None)
        job.decode(replace(short, speculate=False), None)
    found = job.decode(options, None if args.json else job.printer(sys.stdout))
    print(_speed(found), file=sys.stderr)
    comparison = None
    if args.compare:
        # The same seeds, and the same work of printing, to nowhere.
        streamer = None if args.json else job.printer(io.StringIO())
        plain = job.decode(replace(options, speculate=False), streamer, found.stats.seeds)
        rejection_sampling = job.pair.engine.rejection_sampling and options.sampling
        comparison = _Comparison.of(found, plain, compared=not rejection_sampling)
        print(comparison.line(plain), file=sys.stderr)
    if args.json:
        print(json.dumps(job.document(found, comparison)))
    return 0


class _Job:
    """The prompts and the pair that writes on from them."""

    def __init__(self, args: argparse.Namespace, options: GenerationOptions, prompts: list[str]):
        self.args, self.options = args, options
        self.pair = Pair.load(read_options(LoadOptions, args), read_options(DraftOptions, args), options.speculate)
        self._extra: dict[str, Any] = {"num_return_sequences": args.num_return_sequences}
        self.prompts = [prompt for prompt in prompts for _ in range(args.num_return_sequences)]  # of each output row
        if isinstance(options.temperature, tuple):
            self._extra["temperature"] = [
                each for each in options.temperature for _ in range(args.num_return_sequences)
            ]
        tokenizer = self.pair.tokenizer
        if args.chat_template:
            template = Template(self.pair)
            self._ids = [template.encode([{"role": "user", "content": prompt}]) for prompt in prompts]
            self._extra["eos_token_id"] = [*template.eos, *options.stop_token_ids]
        else:
            self._ids = [tokenizer(prompt).input_ids for prompt in prompts]

    def decode(self, options: GenerationOptions, printer: Printer | None, seeds: Sequence[int] | None = None) -> Run:
        extra = self._extra if seeds is None else self._extra | {"seed": seeds}
        return self.pair.run(self._ids, options, streamer=printer, **extra)

    def printer(self, out: Any) -> Printer:
        rows = len(self.prompts)
        headings = [_heading(row, rows, prompt) if rows > 1 else None for row, prompt in enumerate(self.prompts)]
        return Printer(self.pair.tokenizer, headings, out, color=use_color(self.args.color, out))

    def document(self, found: Run, comparison: "_Comparison | None") -> dict[str, Any]:
        """What `--json` prints. Lists have one entry per output row."""
        proposer, target = self.pair.engine.proposer_for(len(self.prompts)), self.pair.engine.target
        return {
            "prompts": self.prompts,
            "texts": [self.pair.tokenizer.decode(row, skip_special_tokens=True) for row in found.tokens],
            "tokens": [len(row) for row in found.tokens],
            "seeds": found.stats.seeds,
            "seconds": found.seconds,
            "tokens_per_second": found.tokens_per_second,
            "stats": _stats(found.stats) | {"rows": [_stats(row) for row in found.stats.rows]},
            "compare": None if comparison is None else asdict(comparison),
            "model": self.pair.name,
            "drafts": self.pair.way,
            "drafter": self.pair.drafts,
            "shape": shape(proposer),
            "options": asdict(self.options),
            "dtype": dtype_name(target.dtype),
            "device": str(target.device),
            "versions": versions(),
        }


@dataclass(frozen=True)
class _Comparison:
    """Speculation against plain decoding. speedup: plain seconds over seconds. equal: None where other tokens of the
    same distribution are promised; first_difference: row and index of the first new token that differs, else None."""

    equal: bool | None
    first_difference: tuple[int, int] | None
    plain_seconds: float
    plain_tokens_per_second: float
    speedup: float

    @classmethod
    def of(cls, found: Run, plain: Run, *, compared: bool) -> "_Comparison":
        pairs = zip(found.tokens, plain.tokens, strict=True) if compared else ()
        places = ((row, first_difference(*pair)) for row, pair in enumerate(pairs))
        differs = next(((row, index) for row, index in places if index is not None), None)
        return cls(
            differs is None if compared else None,
            differs,
            plain.seconds,
            plain.tokens_per_second,
            plain.seconds / found.seconds,
        )

    def line(self, plain: Run) -> str:
        verdict = "the same tokens" if self.equal else "tokens not compared"
        if self.first_difference is not None:
            row, index = self.first_difference
            verdict = f"OTHER TOKENS from token {index} of row {row} on"
        return f"plain: {plain.count} tokens in {plain.seconds:.2f} s, {plain.tokens_per_second:.1f} tokens/s; " + (
            f"{verdict}; {self.speedup:.2f}x as fast with speculation"
        )


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts and args.file is not None:
        raise ArgumentError("give prompts as arguments or with --file, not both")
    try:
        if args.prompts:
            prompts = list(args.prompts)
        elif args.file is not None:
            lines = Path(args.file).read_text(encoding="utf-8-sig").splitlines()
            prompts = [line for line in lines if line.strip()]
        elif sys.stdin.isatty():
            raise ArgumentError(
                'no prompt: give one, as in `redrafter generate "Once upon a time"`, or --file, or pipe it in'
            )
        else:
            prompts = [sys.stdin.read().removesuffix("\n")]
        "".join(prompts).encode()  # what the shell gave need not be text
    except OSError as error:
        raise ArgumentError(f"cannot read {args.file or 'stdin'}: {error.strerror}") from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ArgumentError(f"the prompt is not UTF-8 text: {error.reason}") from error
    if not prompts or "" in prompts:
        raise ArgumentError("the prompt is empty")
    return prompts


def _heading(row: int, rows: int, prompt: str) -> str:
    line = " ".join(prompt.split())
    return f"[{row + 1}/{rows}] " + (line if len(line) <= HEADING else line[: HEADING - 3] + "...")


def _speed(run: Run) -> str:
    return (
        f"{run.count} tokens in {run.seconds:.2f} s, {run.tokens_per_second:.1f} tokens/s, "
        f"{run.stats.tokens_per_step:.2f} tokens per step"
    )


def _stats(stats: Stats) -> dict[str, Any]:
    names = ("steps", "drafted", "accepted", "emitted", "tokens_per_step", "accepted_by_depth")
    return {name: getattr(stats, name) for name in names}
