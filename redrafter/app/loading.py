"""From options to a loaded pair and a run of it."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from redrafter.app.engines import PLAIN, chosen, drafts_by, load_engine, with_config
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.templates import find_template
from redrafter.checkpoints.merged import boxed_pair
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.engine.engine import Engine
from redrafter.engine.stopping import end_tokens
from redrafter.engine.streaming import StepStreamer
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.checkpoint_kind import check_path
from redrafter.measure.run import Run, timed_run
from redrafter.measure.stopwatch import Stopwatch
from redrafter.measure.workload import padded

NO_DRAFT = DraftOptions()
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")

__all__ = ["Pair", "Template", "boxed_model", "checked", "limit_threads"]


def boxed_model() -> str:
    """Directory of the boxed pair."""
    path = boxed_pair()
    if not (path / "config.json").is_file():
        raise CheckpointError(f"this installation holds no boxed pair at {path}: say which model to use with --model")
    return str(path)


def checked(options: LoadOptions, draft: DraftOptions) -> tuple[str, LoadOptions, DraftOptions]:
    """The model's name, and the options once what can be refused without loading anything is."""
    for name in (options.model, options.drafter, draft.draft_model):
        if name == "":
            raise ArgumentError("--model, --drafter and --draft-model need a name, got an empty one")
        if name is not None:
            check_path(name)
    options, draft = with_config(options, draft)
    if options.device is None:
        options = replace(options, device="cuda" if torch.cuda.is_available() else "cpu")
    for flag, device in (("device", options.device), ("draft-device", draft.draft_device)):
        _check_device(flag, device)
    limit_threads(torch.device(options.device or "cpu").type)
    return options.model or boxed_model(), options, draft


def limit_threads(device_type: str) -> None:
    """Beside a GPU the host works on small tensors alone; in a container, many threads for one wait for each other."""
    if device_type == "cuda" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@dataclass
class Pair:
    """A loaded target with what drafts for it and its tokenizer.

    name: what the target was loaded by.
    way: which of the ways to draft it is, or `PLAIN`.
    drafts: what the drafter or the draft model was loaded by.
    """

    name: str
    way: str
    drafts: str | None
    tokenizer: PreTrainedTokenizerBase
    engine: Engine

    @classmethod
    def load(cls, options: LoadOptions, draft: DraftOptions = NO_DRAFT, speculate: bool = True) -> "Pair":
        """Load what the options name; without `speculate`, only the target."""
        name, options, draft = checked(options, draft)
        way = chosen(options, draft)  # which refuses flags that exclude each other, also where nothing drafts
        way = way if speculate else PLAIN
        tokenizer = load_tokenizer(name, trust_remote_code=options.trust_remote_code)
        find_template(tokenizer, name)
        engine = load_engine(way, name, options, draft)
        return cls(name, way, drafts_by(way, name, options, draft), tokenizer, engine)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        *,
        streamer: StepStreamer | None,
        **arguments: Any,
    ) -> Run:
        """Decode prompts, given as token ids, in one batch. arguments: for `generate`, over those from `options`."""
        ids, mask = _padded(prompts, self.tokenizer)
        arguments = self.arguments(options) | arguments
        return timed_run(self.engine, ids, mask, Stopwatch(self.engine.target.device), streamer=streamer, **arguments)

    def arguments(self, options: GenerationOptions) -> dict[str, Any]:
        """For `generate`."""
        sampling = options.sampling or (options.temperature is None and self.engine.do_sample is True)
        arguments: dict[str, Any] = {
            "max_new_tokens": options.max_new_tokens,
            "do_sample": sampling,
            "seed": options.seed,
            "speculate": options.speculate,
        }
        if options.sampling:
            each = options.temperature
            arguments["temperature"] = list(each) if isinstance(each, tuple) else each
        for name in ("top_k", "top_p", "min_p", *PENALTIES):
            if getattr(options, name) is not None:
                arguments[name] = getattr(options, name)
        if options.bad_words:
            arguments["bad_words_ids"] = self._bad_words(options.bad_words)
        self._check_ids("logit-bias", options.logit_bias or ())
        self._check_ids("stop-token-ids", options.stop_token_ids)
        if options.stop_token_ids:
            arguments["eos_token_id"] = [*end_tokens(self.engine.model), *options.stop_token_ids]
        if sampling and self.engine.model.generation_config.top_k is None:
            arguments.setdefault("top_k", 0)  # transformers would cut to 50 where neither user nor model asked for it
        if options.stop:
            arguments |= {"stop_strings": list(options.stop), "tokenizer": self.tokenizer}
        return arguments

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text where it stands first and where it follows a space, each of them once."""
        spelt = [
            self.tokenizer(space + word, add_special_tokens=False).input_ids for word in words for space in ("", " ")
        ]
        return [list(ids) for ids in dict.fromkeys(map(tuple, spelt)) if ids]

    def _check_ids(self, flag: str, ids: Collection[int]) -> None:
        """Raise `ArgumentError` for an id that the model's vocabulary has not."""
        size = self.engine.target.vocab_size
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise ArgumentError(f"--{flag} {wrong[0]} is no token: the model's vocabulary has the ids 0 to {size - 1}")


class Template:
    """A tokenizer's chat template."""

    def __init__(self, pair: Pair):
        self._tokenizer = pair.tokenizer
        if not self._tokenizer.chat_template:
            raise CheckpointError(f"{pair.name} has no chat template; use `redrafter generate` without --chat-template")
        self.eos = end_tokens(pair.engine.model, self._tokenizer)

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a talk, up to where the answer begins."""
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ArgumentError(f"the chat template refuses: {first_line(error)}") from error
        assert isinstance(text, str)
        return self._tokenizer(text, add_special_tokens=False).input_ids


def _check_device(flag: str, device: str | None) -> None:
    if device is None:
        return
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"--{flag} {device} cannot be used: {first_line(error)}") from error


def _padded(prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, P]`, padded on the left, for tokenizers without a padding token too."""
    known = (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    return padded(prompts, next(known))
