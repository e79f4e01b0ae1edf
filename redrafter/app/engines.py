"""From options to one engine or another."""

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.checkpoints.merged import default_sampling, holds_drafter
from redrafter.checkpoints.models import bind
from redrafter.drafting.draft_model import DraftModelProposer
from redrafter.drafting.prompt_lookup import LookupProposer
from redrafter.drafting.proposer import PlainProposer, Proposer
from redrafter.drafting.recurrent import RecurrentProposer
from redrafter.engine.draft_target import DraftTarget
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.engine.prompt_lookup import PromptLookup
from redrafter.engine.recurrent import ReDrafter
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER
from redrafter.target.target import Target

__all__ = [
    "DRAFTER",
    "DRAFT_MODEL",
    "LOOKUP",
    "PLAIN",
    "WAYS",
    "can_draft",
    "check_flags",
    "chosen",
    "drafts_by",
    "load_engine",
    "shape",
    "with_config",
]

WAYS = DRAFTER, DRAFT_MODEL, LOOKUP = "drafter", "draft model", "prompt lookup"
PLAIN = "plain"  # nothing drafts

# The flags that mean something to each way alone, or to some.
_FLAGS = {
    DRAFTER: ("drafter", "num_beams", "draft_len_per_beam", "node_budget", "tuning"),
    DRAFT_MODEL: ("num_beams", "node_budget", "draft_len", "acceptance", "adaptive", "draft_device"),
    LOOKUP: ("draft_len", "ngram"),
}


def chosen(options: LoadOptions, draft: DraftOptions) -> str:
    """What drafts. Raises `ArgumentError` for flags that are for something else."""
    given = {"drafter": options.drafter, "draft-model": draft.draft_model, "prompt-lookup": draft.prompt_lookup or None}
    flags = [f"--{name}" for name, value in given.items() if value is not None]
    if len(flags) > 1:
        raise ArgumentError(f"{' and '.join(flags)} exclude each other")
    way = DRAFT_MODEL if draft.draft_model is not None else LOOKUP if draft.prompt_lookup else DRAFTER
    check_flags(options, draft, {way})
    return way


def can_draft(options: LoadOptions, draft: DraftOptions) -> bool:
    """Return whether the options name something that drafts, or the model is a merged checkpoint."""
    if options.drafter is not None or draft.draft_model is not None or draft.prompt_lookup or options.model is None:
        return True
    try:
        return holds_drafter(options.model)
    except OSError:
        return True  # loading it says what is wrong


def check_flags(options: LoadOptions, draft: DraftOptions, ways: set[str]) -> None:
    """Refuse flags that say nothing about any of these ways."""
    for given in (options, draft):
        for each in fields(given):
            users = [way for way, names in _FLAGS.items() if each.name in names]
            if users and not ways & set(users) and getattr(given, each.name) != each.default:
                needs = {DRAFTER: "a drafter", DRAFT_MODEL: "--draft-model", LOOKUP: "--prompt-lookup"}
                flag = f"--{each.name.replace('_', '-')}"
                raise ArgumentError(f"{flag} is for {' or '.join(needs[way] for way in users)}: leave it out")


def with_config(options: LoadOptions, draft: DraftOptions) -> tuple[LoadOptions, DraftOptions]:
    """What `--draft-target-model-config` stands for, in the options' own places."""
    text = draft.draft_target_model_config
    if text is None:
        return options, draft
    if draft.draft_model is None:
        raise ArgumentError("--draft-target-model-config is for --draft-model: give that too")
    for name, value in (("device", options.device), *((n, getattr(draft, n)) for n in _IN_CONFIG)):
        if value is not None:
            raise ArgumentError(f"--draft-target-model-config says what --{name.replace('_', '-')} says: leave one out")
    draft_len, draft_device, device, rejection_sampling = _read_config(text)
    acceptance = "rejection" if rejection_sampling else "match"
    draft = replace(draft, draft_len=draft_len, draft_device=draft_device, acceptance=acceptance)
    return replace(options, device=device), replace(draft, draft_target_model_config=None)


_IN_CONFIG = ("draft_len", "draft_device", "acceptance")


def _read_config(text: str) -> tuple[int, str, str, bool]:
    """ "[4,[0],[1],False]": draft length, draft devices, target devices, whether to accept by odds."""
    shape = '--draft-target-model-config must look like "[4,[0],[1],False]": draft length, devices of the draft model, '
    try:
        value: Any = ast.literal_eval(text.replace("true", "True").replace("false", "False"))
        draft_len, *devices, rejection_sampling = value
        lists = len(devices) == 2 and all(isinstance(each, list) and each for each in devices)
        if not lists or type(draft_len) is not int or not isinstance(rejection_sampling, bool):
            raise ValueError
        if not all(type(index) is int and index >= 0 for each in devices for index in each):
            raise ValueError
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ArgumentError(f"{shape}devices of the target, acceptance by odds; got {text!r}") from None
    for name, each in zip(("draft model", "target"), devices, strict=True):
        if len(each) > 1:
            raise UnsupportedError(
                f"--draft-target-model-config puts the {name} on {len(each)} devices, which needs tensor parallelism: "
                "that does not exist here yet; give one device each"
            )
    return draft_len, f"cuda:{devices[0][0]}", f"cuda:{devices[1][0]}", rejection_sampling


def drafts_by(way: str, model: str, options: LoadOptions, draft: DraftOptions) -> str | None:
    """Return the name by which the drafter or the draft model was loaded; None where there is neither."""
    if way == DRAFTER:
        return options.drafter or str(Path(model) / DRAFTER_FOLDER)
    return draft.draft_model if way == DRAFT_MODEL else None


def load_engine(way: str, model: str | Target, options: LoadOptions, draft: DraftOptions) -> Engine:
    """Load the engine of one way to draft.

    Args:
        way: one of `WAYS`, or `PLAIN`.
        model: a name, or a target that is bound already.
        options: how to load it.
        draft: what drafts in place of a drafter.
    """
    use = {each.name: getattr(options, each.name) for each in fields(EngineOptions)}
    load: dict[str, Any] = {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code}
    load["device"] = options.device
    if way == PLAIN:
        engine = Engine(bind(model, **load), PlainProposer(), EngineOptions(**use))
        engine.do_sample = default_sampling(model) if isinstance(model, str) else None
        return engine
    own = [name for name in ("draft_len", "ngram", "acceptance") if name in _FLAGS[way]]
    given = {name: value for name in own if (value := getattr(draft, name)) is not None}
    if way == LOOKUP:
        return PromptLookup.from_pretrained(model, options=EngineOptions(**use), **given, **load)
    if way == DRAFT_MODEL:
        assert draft.draft_model is not None
        return DraftTarget.from_pretrained(
            model,
            draft.draft_model,
            num_beams=1 if options.num_beams is None else options.num_beams,
            node_budget=options.node_budget,
            adaptive=draft.adaptive,
            draft_device=draft.draft_device,
            **given,
            **load,
            **use,
        )
    assert isinstance(model, str), "a drafter is found by its model's name"
    return ReDrafter.from_pretrained(
        model,
        options.drafter,
        num_beams=options.num_beams,
        draft_len_per_beam=options.draft_len_per_beam,
        node_budget=options.node_budget,
        tuning=None if options.tuning == "none" else options.tuning,
        **load,
        **use,
    )


def shape(proposer: Proposer) -> dict[str, int] | None:
    """What is drafted per step; None where a tuning, or the default by batch size, has switched speculation off."""
    if isinstance(proposer, RecurrentProposer):
        return {"num_beams": proposer.beams, "draft_len_per_beam": proposer.depth, "nodes": proposer.nodes}
    if isinstance(proposer, DraftModelProposer):
        return {"num_beams": proposer.beams, "draft_len": proposer.depth, "nodes": proposer.nodes}
    if isinstance(proposer, LookupProposer):
        return {"ngram": proposer.ngram, "draft_len": proposer.draft_len}
    return None
