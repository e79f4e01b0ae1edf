"""`redrafter generate`: generate text from prompts."""

import argparse
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import read_options
from redrafter.app.loading import ChatEncoder, Pair
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.program import print_message
from redrafter.chat.messages import text_of
from redrafter.checkpoints.tokenizers import load_processor
from redrafter.cli.printer import Printer, use_color
from redrafter.data.prompts import turns_before_answer
from redrafter.data.rows import Row, open_lines
from redrafter.engine.streamers import StepStreamer
from redrafter.errors import ArgumentError, first_line
from redrafter.files.gguf_file import SUFFIX
from redrafter.measure import record
from redrafter.measure.decode import Batches, PromptIds, RepeatedRuns
from redrafter.measure.prompts import ROW_SUFFIXES, encode, read_prompts
from redrafter.measure.record import ROUNDS_INSIDE, UNDRAFTED, Record, describe_stats, drafts_left_out
from redrafter.measure.table import SPEED, format_records
from redrafter.measure.trial import Trial, describe
from redrafter.parallel.launched import launched_processes
from redrafter.parallel.ranks import Ranks, join_ranks

WARM_UP_TOKENS = 8  # new tokens of a warm-up run before a comparison
MAX_HEADING_CHARS = 60  # of a prompt in the line above its text


def run_checked(args: argparse.Namespace) -> int:
    """Run the command: read prompts, generate, print the texts and the speed."""
    options, copies = read_options(GenerationOptions, args), args.num_return_sequences
    if copies < 1:
        raise ArgumentError(f"--num-return-sequences must be 1 or more, got {copies}")
    if args.compare and not options.speculate:
        raise ArgumentError("--compare sets speculation against undrafted decoding: leave out --no-speculate")
    rows = _read_rows(args)
    if args.image and (len(rows) != 1 or rows[0].prompt is None or not args.chat):
        raise ArgumentError("--image shows images before one prompt of a chat: add --chat, and give one prompt")
    if isinstance(options.temperature, tuple) and len(options.temperature) != len(rows):
        raise ArgumentError(
            f"--temperature has {len(options.temperature)} values for {len(rows)} prompts: give one, or one for each"
        )
    load = read_options(LoadOptions, args)
    chats = args.chat or any(row.messages for row in rows)
    if not chats and (load.chat_template is not None or load.chat_template_kwargs or load.plain_chat_template):
        raise ArgumentError("options of the chat template are for chats: add --chat, or leave them out")
    pair = Pair.load(load, read_options(DraftOptions, args), options.speculate)
    extra: dict[str, Any] = {"num_return_sequences": copies}  # arguments of `Engine.generate` in addition to the ids
    chat = ChatEncoder(pair) if chats else None
    if chat is not None:
        extra["eos_token_id"] = [*chat.eos, *options.stop_token_ids]
    if args.image:
        # The processor inserts image placeholders, so it must render the template itself.
        ids, images = encode_with_images(pair, str(rows[0].prompt), args.image, load.trust_remote_code)
        extra |= images
    else:
        ids = encode([_as_turn(row) if args.chat else row for row in rows], pair.tokenizer)
    prompts = [_shown(row, pair.tokenizer, row_ids) for row, row_ids in zip(rows, ids, strict=True)]
    texts = [prompt for prompt in prompts for _ in range(copies)]  # the prompt of each output row
    if isinstance(options.temperature, tuple):
        extra["temperature"] = [temperature for temperature in options.temperature for _ in range(copies)]

    def printer(out: TextIO) -> Printer | None:
        if args.json:
            return None
        lines = (" ".join(prompt.split()) for prompt in texts)
        shown = [line if len(line) <= MAX_HEADING_CHARS else line[: MAX_HEADING_CHARS - 3] + "..." for line in lines]
        count = len(shown)
        headings = [f"[{row}/{count}] {line}" if count > 1 else None for row, line in enumerate(shown, 1)]
        return Printer(pair.tokenizer, headings, out, color=use_color(args.color, out))

    trial = pair.trial(options, **extra)
    if args.compare:
        warm_up(trial, ids)
    run = trial.run_batch(ids, 0, streamer=printer(sys.stdout))
    stats = run.stats
    print(
        f"{run.count} tokens in {run.seconds:.2f} s, {run.tokens_per_second:.1f} tokens/s, "
        f"{stats.tokens_per_step:.2f} tokens per step{drafts_left_out(stats, trial.mode)}",
        file=sys.stderr,
    )
    answers = [str(pair.tokenizer.decode(row, skip_special_tokens=True)) for row in run.tokens]
    if (empty := sum(not answer.strip() for answer in answers)) and pair.tokenizer.chat_template and chat is None:
        print_message(
            "note",
            f"{empty} of {len(answers)} texts are empty: the model has a chat template, without which it may end at "
            "once; add --chat",
        )
    comparison: list[Record] = []
    if args.compare:
        trial.ran.repeats.append([run])
        comparison = compare_trial(trial, [ids], printer)
        if pair.engine.target.rounding and comparison[1].differences:
            print_message("note", f"{pair.name} {ROUNDS_INSIDE}")
    if args.json:
        document = {
            "prompts": texts,  # of each output row, as all lists
            "texts": answers,
            "tokens": [len(row) for row in run.tokens],
            "seeds": stats.seeds,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens_per_second,
            "stats": {**describe_stats(stats), "rows": [describe_stats(row) for row in stats.rows]},
            "compare": [record.to_json(each) for each in comparison] or None,
            "model": pair.name,
            "drafts": pair.method,
            "drafter": pair.drafting_model,
            "shape": pair.engine.proposer_for(len(texts)).sizes,
            "options": asdict(options),
        }
        print(json.dumps({**document, **record.conditions(pair.engine.target)}))
    return 0


def undrafted_of(trial: Trial) -> Trial:
    """Return undrafted decoding with the engine and the arguments of a mode."""
    return replace(trial, mode=UNDRAFTED, arguments=trial.arguments | {"speculate": False}, ran=RepeatedRuns())


def warm_up(trial: Trial, prompts: PromptIds) -> None:
    """Decode a few tokens with drafts and without, so that no timed run compiles or captures."""
    for each in (trial, undrafted_of(trial)):
        each.run_batch(prompts, 0, max_new_tokens=min(WARM_UP_TOKENS, trial.arguments["max_new_tokens"]))
    trial.engine.forget_prefixes()


def compare_trial(trial: Trial, batches: Batches, printer: Callable[[TextIO], StepStreamer | None]) -> list[Record]:
    """Decode the batches of a mode, which has run, without drafts; print and return the records of both.

    Text is formatted by `printer` as in the timed runs, so that times are comparable.
    """
    trial.engine.forget_prefixes()  # the first run of each prompt prefilled it too
    copies, undrafted = trial.arguments.get("num_return_sequences", 1), undrafted_of(trial)
    runs = [undrafted.run_batch(batch, first, streamer=printer(io.StringIO())) for first, batch in enumerate(batches)]
    undrafted.ran.repeats.append(runs)
    rows = [[prompt for prompt in batch for _ in range(copies)] for batch in batches]
    records = [describe(each, undrafted, rows) for each in (undrafted, trial)]
    print(*format_records(records, SPEED), sep="\n", file=sys.stderr)
    return records


def _as_turn(row: Row) -> Row:
    """Convert a row of plain text to a user's turn of a chat; return other rows unchanged."""
    text = row.text if row.prompt is None else row.prompt
    return row if text is None else Row(row.where, messages=[{"role": "user", "content": text}])


def _shown(row: Row, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the prompt of a row for headings and the JSON document; for a chat, its last turn."""
    if row.messages is not None:
        return text_of(turns_before_answer(row)[-1]["content"])
    text = row.text if row.prompt is None else row.prompt
    return str(tokenizer.decode(ids)) if text is None else text


def _read_rows(args: argparse.Namespace) -> list[Row]:
    """Read the prompts that the command line names: rows of a JSON or Parquet file, otherwise plain text."""
    if args.file is not None and Path(args.file).suffix in (*ROW_SUFFIXES, ".parquet"):
        return read_prompts(args.file)
    return [Row(f"prompt {number}", prompt=prompt) for number, prompt in enumerate(_read_prompts(args), start=1)]


def _read_prompts(args: argparse.Namespace) -> list[str]:
    try:
        if args.prompts:
            prompts = list(args.prompts)
            # os.path, since pathlib raises an error for a text longer than a file name may be.
            files = ((x, x if x.endswith(SUFFIX) else os.path.join(x, "config.json")) for x in prompts)
            model = next((x for x, file in files if os.path.isfile(file)), None)
            if model is not None and "model" not in args:
                words = ["redrafter", "generate", "--model", model, *(word for word in prompts if word != model)]
                raise ArgumentError(
                    f"{model} is a model, and would be a text that the pair in the box continues: "
                    f"type {shlex.join(words)}; to continue that text, pipe it in"
                )
        elif args.file is not None:
            prompts = _read_on_first_rank(lambda: [line.rstrip("\n") for _, line in open_lines(Path(args.file))])
        elif sys.stdin.isatty():
            message = 'no prompt: give one, as in `redrafter generate "Once upon a time"`, or --file, or pipe it in'
            raise ArgumentError(message)
        else:
            prompts = _read_on_first_rank(lambda: [sys.stdin.read().removesuffix("\n")])
        "".join(prompts).encode()  # fails for arguments that are not UTF-8, which the shell passes on
    except OSError as error:
        raise ArgumentError(f"cannot read stdin: {error.strerror}") from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ArgumentError(f"the prompt is not UTF-8 text: {error.reason}") from error
    if not prompts or "" in prompts:
        raise ArgumentError("the prompt is empty")
    return prompts


def _read_on_first_rank(read: Callable[[], list[str]]) -> list[str]:
    """Return what rank 0 reads from stdin or a file, which may be a pipe: processes of torchrun share it."""
    if launched_processes() == 1:
        return read()
    join_ranks(launched_processes())
    ranks = Ranks.of_world()
    return ranks.from_first(read() if ranks.rank == 0 else [])


def encode_with_images(
    pair: Pair, prompt: str, files: Sequence[str], trust_remote_code: bool
) -> tuple[list[list[int]], dict[str, Any]]:
    """Encode a user's turn with the images of `files` followed by the prompt.

    Returns its token ids as one row, and the image arguments of `Engine.generate`.

    Raises:
        ArgumentError: A file is no image, or the model's processor cannot read one.
        UnsupportedError: The model takes no images.
    """
    target = pair.engine.target
    target.images.check()
    processor = load_processor(pair.name, trust_remote_code=trust_remote_code)
    from PIL import Image, ImageOps  # imported late: an optional dependency that the processor requires

    content: list[dict[str, object]] = []
    for file in files:
        try:
            with Image.open(file) as image:
                content.append({"type": "image", "image": ImageOps.exif_transpose(image).convert("RGB")})
        except (OSError, ValueError, SyntaxError) as error:
            raise ArgumentError(f"--image {file} cannot be read: {first_line(error)}") from error
    content.append({"type": "text", "text": prompt})
    try:
        form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        chat = [{"role": "user", "content": content}]
        inputs = processor.apply_chat_template(chat, chat_template=pair.tokenizer.chat_template, **form)
    except (ValueError, TypeError, LookupError) as error:
        raise ArgumentError(f"the model's processor refuses an image: {first_line(error)}") from error
    return inputs["input_ids"].tolist(), {name: inputs[name] for name in inputs if name in target.image_inputs}
