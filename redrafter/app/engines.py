"""Choose a drafting method from command-line options, and load its engine."""

import importlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch

from redrafter.app.flags import flag
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.app.program import print_message
from redrafter.checkpoints.drafters import holds_drafter
from redrafter.checkpoints.merged import default_sampling, find_file
from redrafter.checkpoints.models import bind
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.engine.draft_target import DraftTarget
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.engine.prompt_lookup import PromptLookup
from redrafter.engine.redrafter import ReDrafter
from redrafter.errors import ArgumentError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE
from redrafter.measure.record import PROMPT_LOOKUP, UNDRAFTED
from redrafter.model.target import Target
from redrafter.parallel.launched import launched_processes, process_rank

DRAFTER, RECYCLED, DRAFT_MODEL = "drafter", "recycled tokens", "draft model"
# Modules of the compiler of models, and of the processes in which it compiles kernels.
COMPILER, COMPILER_PROCESSES = "torch._inductor.compile_fx", "torch._inductor.async_compile"


def choose_method(options: LoadOptions, draft: DraftOptions, speculate: bool = True) -> str:
    """Return the drafting method that the options choose, a key of `METHODS`; `UNDRAFTED` without `speculate`.

    Raises:
        ArgumentError: The options select several methods, or set an option that the method does not support.
    """
    values = vars(options) | vars(draft)
    asked = {
        name: by for name, method in METHODS.items() if (by := method.chosen_by) and values[by] not in (None, False)
    }
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
