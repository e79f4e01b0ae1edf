"""Windows to train on and prompts to validate on, from the files that `--data` and `--validate` name.

A loss that is not finite is reported with the rows of these files that its batch was made of.
"""

from collections.abc import Iterable, Iterator

from transformers import PreTrainedTokenizerBase

from redrafter.data.documents import encode_documents, format_sample
from redrafter.data.prompts import sample_prompts
from redrafter.data.rows import Row, read_rows
from redrafter.data.windows import Windows
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.train.config import TrainConfig
from redrafter.train.plan import row_length

MAX_NAMED_ROWS = 8
MAX_SHOWN_ROWS = 2  # of the named rows, those whose text is shown
MAX_SHOWN_CHARS = 40  # of the text of each

# Of a held-out text, the share that is the prompt, and the most tokens of it.
VALIDATION_PROMPT_SHARE, MAX_VALIDATION_PROMPT_TOKENS = 0.5, 64


def load_windows(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Read and tokenize the rows to train on. Raises `CheckpointError` if there are none or one cannot be read."""
    windows = Windows(
        encode_documents(_training_rows(config), tokenizer), row_length(config), tokenizer.bos_token_id, config.pack
    )
    if not len(windows):
        raise _no_rows(config)
    return windows


def show_first_document(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first text to train on, with its learnt parts marked. Raises `CheckpointError` if there is none."""
    document = next(encode_documents(_training_rows(config), tokenizer), None)
    if document is None:
        raise _no_rows(config)
    return format_sample(document, tokenizer)


def validation_prompts(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, context: int | None) -> list[list[int]]:
    """Choose the held-out prompts that the base continues for validation.

    `context` is the number of tokens of the base's context; None for no limit. Returns token ids of each prompt. Raises
    `ArgumentError` where a validation was asked for and no prompt is left.
    """
    rows = read_rows([config.validate] if config.validate else config.data)
    held_out = (row for row in rows if row.split == "val" or (config.validate and row.split != "train"))
    length = row_length(config)
    max_tokens = length if context is None else min(length, context - 1)
    chosen = sample_prompts(
        held_out,
        tokenizer,
        config.validate_prompts,
        max_tokens,
        config.seed,
        text_share=VALIDATION_PROMPT_SHARE,
        max_text_tokens=MAX_VALIDATION_PROMPT_TOKENS,
    )
    if not chosen and (config.validate or config.validate_every):
        raise ArgumentError(
            f"{config.validate or ', '.join(config.data)}: no prompt of 1 to {max_tokens} tokens to validate on; give "
            "--validate other rows and --validate-prompts more than 0, or leave these and --validate-every out"
        )
    return chosen


def _training_rows(config: TrainConfig) -> Iterator[Row]:
    return (row for row in read_rows(config.data) if row.split in (None, "train"))


def _no_rows(config: TrainConfig) -> CheckpointError:
    return CheckpointError(f"{', '.join(config.data)}: no row to train on; rows of split val and test are not")


def describe_bad_rows(window_numbers: Iterable[int], windows: Windows, tokenizer: PreTrainedTokenizerBase) -> str:
    """Name the rows of some windows by file and line, in the order of the data, and show how the first ones begin.

    `window_numbers` are those of a batch, in the order of the data.
    """
    first_windows: dict[str, int] = {}  # by file and line, the first window of each row
    for number in sorted(window_numbers):
        first_windows.setdefault(windows.origins[number], number)
    shown = list(first_windows.values())[:MAX_SHOWN_ROWS]
    spans = ((windows.offsets[number], windows.offsets[number + 1]) for number in shown)
    beginnings = (windows.tokens[first : min(first + MAX_SHOWN_CHARS, last)] for first, last in spans)
    texts = [repr(str(tokenizer.decode(ids))[:MAX_SHOWN_CHARS]) for ids in beginnings]
    count = len(first_windows)
    more = f" and {count - MAX_NAMED_ROWS} more" if count > MAX_NAMED_ROWS else ""
    return f", in rows {', '.join(list(first_windows)[:MAX_NAMED_ROWS])}{more}, which begin with {', '.join(texts)}"
