"""Choose a drafting method from options, load its engine, target and tokenizer, and time `generate` on them."""

import importlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import flag
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.program import print_message
from redrafter.app.templates import load_chat_tokenizer
from redrafter.chat.messages import encode_chat
from redrafter.chat.template import HOW_TO_GIVE_ONE, chat_template_of
from redrafter.checkpoints.adapters import read_adapter
from redrafter.checkpoints.drafters import holds_drafter
from redrafter.checkpoints.merged import boxed_pair, default_sampling, find_file
from redrafter.checkpoints.models import bind, device_error
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.engine.draft_target import DraftTarget
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.engine.prompt_lookup import PromptLookup
from redrafter.engine.redrafter import ReDrafter
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE, split_adapter
from redrafter.files.cpu_quota import cpu_quota
from redrafter.measure.decode import pad_token_of
from redrafter.measure.record import PROMPT_LOOKUP, UNDRAFTED
from redrafter.measure.trial import Trial
from redrafter.model.target import Target
from redrafter.parallel.launched import launched_processes, process_rank
from redrafter.sampling.params import NUMBERS
from redrafter.scheduler.request import check_token_ids

NO_DRAFT_OPTIONS = DraftOptions()
DRAFTER, RECYCLED, DRAFT_MODEL = "drafter", "recycled tokens", "draft model"
# Modules of the compiler of models, and of the processes in which it compiles kernels.
COMPILER, COMPILER_PROCESSES = "torch._inductor.compile_fx", "torch._inductor.async_compile"


def choose_method(options: LoadOptions, draft: DraftOptions, speculate: bool = True) -> str:
    """Return the drafting method that the options choose, a key of `METHODS`; `UNDRAFTED` without `speculate`.

    Raises:
        ArgumentError: The options select several methods, or set an option that the method does not support.
    """
    values = vars(options) | vars(draft)
    asked = {name: by for name, x in METHODS.items() if (by := x.chosen_by) and values[by] not in (None, False)}
    if len(asked) > 1:
        raise ArgumentError(f"{' and '.join(map(flag, asked.values()))} exclude each other")
    method = next(iter(asked)) if asked else DRAFTER if not speculate or has_drafter(options) else RECYCLED
    check_method_options(options, draft, {method})
    return method if speculate else UNDRAFTED


def has_drafter(options: LoadOptions) -> bool:
    """Return whether the options name a drafter, or a checkpoint that holds one."""
    try:
        return options.drafter is not None or options.model is None or holds_drafter(options.model)
    except OSError:
        return True  # loading the model reports the error


def check_method_options(options: LoadOptions, draft: DraftOptions, methods: set[str]) -> None:
    """Raise `ArgumentError` if an option is set that none of the drafting methods supports."""
    for group in (options, draft):
        values = vars(group)
        for item in fields(group):
            owners = {name: method for name, method in METHODS.items() if item.name in method.options}
            if owners and not methods & owners.keys() and values[item.name] != item.default:
                chosen = " or ".join(
                    "a drafter" if name == DRAFTER else flag(by)
                    for name, method in owners.items()
                    if (by := method.chosen_by)
                )
                raise ArgumentError(f"{flag(item.name)} is for {chosen}: leave it out")


def drafting_model_name(method: str, model: str, options: LoadOptions, draft: DraftOptions) -> str | None:
    """Return the directory or hub id of the method's drafter or draft model; None if it has neither."""
    if method == DRAFTER:
        merged = options.drafter is None and find_file(model, SHAPE_FILE) is not None
        return str(Path(model) / DRAFTER_FOLDER) if merged else options.drafter or model  # which has an MTP layer
    return draft.draft_model if method == DRAFT_MODEL else None


def load_engine(method: str, model: str | Target, options: LoadOptions, draft: DraftOptions) -> Engine:
    """Load the engine of a drafting method, a key of `METHODS` or `UNDRAFTED`.

    `model` is a directory or hub id, or a loaded target.
    """
    if not options.compile or not torch.cuda.is_available() or str(options.device).startswith("cpu"):
        return _load(method, model, options, draft)
    # The compiler and its processes take seconds to start, and reading weights leaves Python idle for most of its time.
    starting = Thread(target=_start_compiler, daemon=True)
    starting.start()
    engine = _load(method, model, options, draft)
    starting.join()  # not after an error, which is reported at once
    return engine


def _start_compiler() -> None:
    importlib.import_module(COMPILER)
    # Until its processes have imported torch, kernels are compiled in this one, one by one.
    importlib.import_module(COMPILER_PROCESSES).maybe_warm_pool()


def _load(method: str, model: str | Target, options: LoadOptions, draft: DraftOptions) -> Engine:
    use = {item.name: vars(options)[item.name] for item in fields(EngineOptions)}
    load: dict[str, Any] = {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code}
    load["device"], load["tp_size"] = options.device, launched_processes()
    # A loaded target has been quantized already.
    load["quantization"] = options.quantization if isinstance(model, str) else None
    if method == UNDRAFTED:
        engine = Engine(bind(model, **load), UndraftedProposer(), EngineOptions(**use))
        engine.do_sample = default_sampling(model) if isinstance(model, str) else None
        return engine
    names = METHODS[method].options
    values = {name: value for name, value in (vars(options) | vars(draft)).items() if name in names}
    return METHODS[method].load(model, **{name: x for name, x in values.items() if x is not None}, **load, **use)


def _load_drafter(model: str | Target, drafter: str | None = None, **keywords: Any) -> Engine:
    assert isinstance(model, str), "the drafter's directory is found from the name of the model"
    return ReDrafter.from_pretrained(model, drafter, **keywords)


def _load_recycled(model: str | Target, **keywords: Any) -> Engine:
    if process_rank() == 0:
        print_message(
            "note",
            f"{model} holds no drafter, so tokens are recycled as drafts, without training: a drafter (--drafter D) is "
            "faster, and --no-speculate drafts nothing",
        )
    return _load_drafter(model, **keywords)


class DraftingMethod(NamedTuple):
    """Describes a drafting method on the command line.

    Attributes:
        chosen_by: Name of the option that selects it; None for the one without a drafter.
        options: Names of the method-specific options that it supports, as keyword arguments of `load`.
        load: Function that loads its engine from the target, the options that are set, and the common options.
    """

    chosen_by: str | None
    options: tuple[str, ...]
    load: Callable[..., Engine]


_SEARCH = ("num_beams", "node_budget")
_CHAIN = ("draft_len", "acceptance", "adaptive")
METHODS = {
    DRAFTER: DraftingMethod(
        "drafter", ("drafter", "draft_len_per_beam", "base_embedding", "draft_quantization", *_SEARCH), _load_drafter
    ),
    RECYCLED: DraftingMethod(None, ("draft_len_per_beam", *_SEARCH), _load_recycled),
    DRAFT_MODEL: DraftingMethod(
        "draft_model", ("draft_model", "draft_quantization", *_CHAIN, *_SEARCH), DraftTarget.from_pretrained
    ),
    PROMPT_LOOKUP: DraftingMethod("prompt_lookup", ("draft_len", "ngram"), PromptLookup.from_pretrained),
}


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
        for name, ids in (("logit_bias", options.logit_bias or ()), ("stop_token_ids", options.stop_token_ids)):
            check_token_ids(ids, self.engine.target.vocab_size, flag(name))
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
