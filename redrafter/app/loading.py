"""Load a target, its drafter and its tokenizer from command-line options, and time `generate` on them."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from redrafter.app.engines import choose_method, drafting_model_name, load_engine
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.program import print_message
from redrafter.app.templates import load_chat_tokenizer
from redrafter.chat.messages import encode_chat
from redrafter.chat.template import HOW_TO_GIVE_ONE, chat_template_of
from redrafter.checkpoints.adapters import read_adapter
from redrafter.checkpoints.merged import boxed_pair
from redrafter.checkpoints.models import device_error
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.engine.engine import Engine
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import split_adapter
from redrafter.files.cpu_quota import cpu_quota
from redrafter.measure.decode import pad_token_of
from redrafter.measure.record import UNDRAFTED
from redrafter.measure.trial import Trial
from redrafter.parallel.launched import launched_processes
from redrafter.sampling.params import NUMBERS
from redrafter.scheduler.request import check_token_ids

NO_DRAFT_OPTIONS = DraftOptions()


def boxed_model() -> str:
    """Return the directory of the boxed pair; raise `CheckpointError` if it is not installed."""
    path = boxed_pair()
    if not (path / "config.json").is_file():
        raise CheckpointError(f"this installation holds no boxed pair at {path}: say which model to use with --model")
    return str(path)


def check_options(options: LoadOptions, draft: DraftOptions) -> tuple[str, LoadOptions, DraftOptions]:
    """Validate the options before any model is loaded, and resolve their defaults.

    Returns:
        Directory or hub id of the model, the load options with a device, and the draft options.
    """
    shared, default = launched_processes() > 1, "cuda" if torch.cuda.is_available() else "cpu"
    if (device := options.device) is not None:
        if shared:
            raise ArgumentError(f"--device {device}: each of several processes has a device of its own; leave it out")
        try:
            torch.empty(1, device=device).item()
        except (RuntimeError, AssertionError) as error:
            raise device_error(f"--device {device}", device, error) from error
    limit_threads(torch.device(options.device or default).type)
    if not shared:
        options = replace(options, device=options.device or default)
    return options.model or boxed_model(), options, draft


def limit_threads(device_type: str) -> None:
    """Let torch use no more CPU threads than help, unless OMP_NUM_THREADS is set.

    If the model is on a GPU, the CPU processes small tensors only, in one thread. Otherwise a container may limit the
    CPU time of its processes below the cores that torch detects, whose threads would then block each other.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    if device_type == "cuda":
        torch.set_num_threads(1)
    elif (quota := cpu_quota()) is not None and torch.get_num_threads() > (threads := max(int(quota), 1)):
        torch.set_num_threads(threads)
        print_message(
            "note",
            f"this container may use {quota:g} CPU cores, so torch uses {threads} of {os.cpu_count()} threads: "
            "OMP_NUM_THREADS=N uses N",
        )


@dataclass
class Pair:
    """A loaded target with its tokenizer and the engine that drafts for it."""

    name: str  # directory or hub id of the target
    method: str  # a key of `METHODS`, or `UNDRAFTED`
    drafting_model: str | None  # directory or hub id of the drafter or the draft model; None if there is neither
    tokenizer: PreTrainedTokenizerBase  # of the target
    engine: Engine

    @classmethod
    def load(cls, options: LoadOptions, draft: DraftOptions | None = None, speculate: bool = True) -> "Pair":
        """Load the target, its tokenizer and its drafting engine.

        `draft` is None for commands without these options. Without `speculate` only the target is loaded.
        """
        name, options, draft = check_options(options, draft or NO_DRAFT_OPTIONS)
        method = choose_method(options, draft, speculate)
        # Before `load_engine`: an invalid template is reported without waiting for weights.
        tokenizer = load_chat_tokenizer(name, options, trust_remote_code=options.trust_remote_code)
        engine = load_engine(method, name, options, draft)
        if (device := engine.target.device).type == "cuda":
            torch.cuda.set_device(device)  # for what a command computes outside calls of the engine
        return cls(name, method, drafting_model_name(method, name, options, draft), tokenizer, engine)

    def trial(self, options: GenerationOptions, **more: Any) -> Trial:
        """Return the mode of decoding that options choose; `more` arguments of `Engine.generate` override theirs."""
        arguments = self.arguments(options) | more
        # Rejection sampling preserves the distribution, not the tokens.
        exact = not (options.speculate and self.engine.rejection_sampling and arguments["do_sample"])
        mode, tokenizer = self.method if options.speculate else UNDRAFTED, self.tokenizer
        return Trial(mode, self.engine, arguments, pad_token_of(tokenizer), exact, tokenizer.decode)

    def arguments(self, options: GenerationOptions) -> dict[str, Any]:
        """Convert the options to arguments of `Engine.generate`."""
        sampling = options.sampling or (options.temperature is None and self.engine.samples_by_default is True)
        arguments: dict[str, Any] = {
            "max_new_tokens": options.max_new_tokens,
            "do_sample": sampling,
            # Drawn here, so that it is known and the run can be repeated.
            "seed": secrets.randbits(61) if options.seed is None else options.seed,
            "speculate": options.speculate,
        }
        if options.sampling:
            temperature = options.temperature
            arguments["temperature"] = list(temperature) if isinstance(temperature, tuple) else temperature
        values = vars(options)
        arguments |= {name: values[name] for name in (*NUMBERS, "logit_bias") if values.get(name) is not None}
        if options.adapter is not None:
            arguments["adapter"], path = split_adapter(options.adapter)
            # The engine keeps adapters between batches.
            if arguments["adapter"] not in self.engine.adapters:
                weights = read_adapter(path)
                self.engine.target.adapters.load(arguments["adapter"], weights, 1, weights.rank)
        # Tokenizers encode a word differently with a leading space, so ban both spellings.
        if options.bad_words:
            texts = (space + word for word in options.bad_words for space in ("", " "))
            spellings = dict.fromkeys(tuple(self.tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
            arguments["bad_words_ids"] = [list(ids) for ids in spellings if ids]
        # An id outside of the vocabulary would be ignored silently, or fail on the device.
        for flag, ids in (("logit-bias", options.logit_bias or ()), ("stop-token-ids", options.stop_token_ids)):
            check_token_ids(ids, self.engine.target.vocab_size, f"--{flag}")
        if options.stop_token_ids:
            arguments["eos_token_id"] = [*end_tokens(self.engine.model), *options.stop_token_ids]
        if sampling and self.engine.model.generation_config.top_k is None:
            arguments.setdefault("top_k", 0)  # transformers defaults to the 50 likeliest tokens
        if options.stop:
            arguments |= {"stop_strings": list(options.stop), "tokenizer": self.tokenizer}
        return arguments


class ChatEncoder:
    """Encodes chats as token ids with the chat template of a pair's tokenizer.

    Attributes:
        eos: Token ids that end an answer.
    """

    def __init__(self, pair: Pair):
        self._tokenizer = pair.tokenizer
        if not self._tokenizer.chat_template:
            message = f"{pair.name} has no chat template: {HOW_TO_GIVE_ONE}, or use `redrafter generate` without --chat"
            raise CheckpointError(message)
        self.eos = end_tokens(pair.engine.model, self._tokenizer)

    def encode(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of a chat, ending where the model's next answer starts."""
        return encode_chat(chat_template_of(self._tokenizer), messages)
