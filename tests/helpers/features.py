"""Models with every feature, and engines with every kind of drafts: what tests/matrix crosses.

A feature that is added to `FEATURES`, or an engine to `ENGINES`, is tested with all the others, on all caches.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from helpers.adapters import adapted, saved
from helpers.context_drafter import checked_windows, context_drafter
from helpers.dflash import DFLASH_FORMS, checked_blocks, random_block_drafter
from helpers.eagle import EAGLE_FORMS, checked_drafts, random_head
from helpers.models import CHUNKED, bound, script_of_rows, tiny_drafter, tiny_model, uneven_batch
from helpers.mtp import checked_layers, random_mtp
from helpers.recurrent import generated_alone, recurrent_model
from helpers.scheduling import KINDS, alone, change, make_sequence, seeing_sequence
from helpers.seeing_models import UNEVEN, prompts_with_images, tiny_seeing_model
from helpers.vocabularies import renumbered
from redrafter import DraftTarget, Engine, ReDrafter
from redrafter.checkpoints.drafters import new_table
from redrafter.drafting.prompt_lookup import WithPromptLookup, graft
from redrafter.drafting.proposer import UNDRAFTED, State, UndraftedProposer
from redrafter.engine.options import EngineOptions
from redrafter.scheduler.sequence import TokenSequence
from redrafter.tree.sizes import TreeShape
from redrafter.tree.token_tree import Tree

NEW = 24
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "seed": 3, "eos_token_id": None}
ADAPTERS: dict[str, dict] = {"one": {}, "two": {"seed": 2, "target_modules": ["o_proj", "down_proj"]}}
ROWS = ("one", None, "two", "one")  # adapters of a batch's rows


@dataclass(frozen=True)
class Feature:
    """A model, and what its prompts have.

    Attributes:
        model: Makes the model.
        options: Fields of its engines' options.
        dtype: Dtype of its weights.
        images: Whether its prompts have images.
        adapters: Whether rows have adapters.
        greedy: What a batch must write greedily: what `model.generate` writes of all rows together, of each alone, or,
            where numbers are others on purpose, only what it writes without drafts.
        caches: Caches that a batch can be on; "own" is that of an engine which makes its paged cache by itself.
        stores_keys: Whether layers store keys and values, which may go on on the host.
    """

    model: Callable[[], PreTrainedModel]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    images: bool = False
    adapters: bool = False
    greedy: str = "together"
    caches: Sequence[str] = ("dense", "paged")
    stores_keys: bool = True


LIMITS = {"kv_cache_free_gpu_memory_fraction": 0.01, "max_seq_len": 96}
FEATURES: dict[str, Feature] = {
    "text": Feature(lambda: tiny_model("llama")),
    "window": Feature(lambda: tiny_model("gemma3_text")),
    "chunks": Feature(lambda: tiny_model("llama4_text", **CHUNKED)),
    "soft caps": Feature(lambda: tiny_model("gemma2")),
    "sinks": Feature(lambda: tiny_model("gpt_oss")),
    "latent keys": Feature(lambda: tiny_model("deepseek_v3")),
    "learned positions": Feature(lambda: tiny_model("gpt2")),
    "convolutions": Feature(lambda: recurrent_model("lfm2"), greedy="alone"),
    "states": Feature(lambda: recurrent_model("mamba2"), greedy="alone", stores_keys=False),
    "images": Feature(lambda: tiny_seeing_model("qwen2_5_vl"), images=True),
    "adapters": Feature(lambda: tiny_model("llama"), adapters=True),
    "images and adapters": Feature(lambda: tiny_seeing_model("qwen2_5_vl"), images=True, adapters=True),
    "fp8": Feature(
        lambda: tiny_model("llama"), {"kv_cache_dtype": "fp8", **LIMITS}, torch.float64, greedy="plain", caches=("own",)
    ),
    "fp8 images": Feature(
        lambda: tiny_seeing_model("qwen2_5_vl"),
        {"kv_cache_dtype": "fp8", **LIMITS},
        torch.float64,
        images=True,
        greedy="plain",
        caches=("own",),
    ),
    "invariant": Feature(
        lambda: tiny_model("qwen3"),
        {"batch_invariant": True, **LIMITS},
        torch.bfloat16,
        greedy="plain",
        caches=("own",),
    ),
}


def sized(model: PreTrainedModel) -> dict[str, int]:
    config = model.config.get_text_config()
    return {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}


def recurrent(model: PreTrainedModel, options: EngineOptions, shape: TreeShape, drafter: Any = None) -> ReDrafter:
    drafter = drafter or tiny_drafter(**sized(model))
    return ReDrafter(bound(model), drafter.to(model.dtype), shape, options=options)


def draft_target(model: PreTrainedModel, options: EngineOptions, **shape: Any) -> DraftTarget:
    """Make an engine whose drafts are often right: the model drafts for itself, and for images a tiny Llama."""
    recurs = model.config.model_type in ("lfm2", "mamba2")
    other = recurrent_model(model.config.model_type) if recurs else tiny_model("llama", max_position_embeddings=384)
    return DraftTarget(bound(model), bound(other.to(model.dtype)), **{"draft_len": 3, **shape}, options=options)


def other_vocabulary(model: PreTrainedModel, options: EngineOptions) -> DraftTarget:
    draft_model, vocabulary = renumbered(tiny_model("llama", max_position_embeddings=384), 0.67)
    target, draft = bound(model), bound(draft_model.to(model.dtype))
    return DraftTarget(target, draft, draft_len=3, vocabulary=vocabulary, options=options)


def sharing(model: PreTrainedModel, options: EngineOptions, drafter: Any = None) -> ReDrafter:
    """Make an engine whose rows share the nodes of a step."""
    drafter = (drafter or tiny_drafter(**sized(model))).to(model.dtype)
    return ReDrafter(bound(model), drafter, TreeShape(4, 4, 17, 16), options=options)


@dataclass
class Grafted:
    """Grafts onto the drafts of another proposer what a row is known to continue with, as if it had been copied.

    Random models repeat themselves too seldom for copies that are right, or for any at all.

    Attributes:
        copying: The other proposer and the number of nodes that are added.
        known: Texts that rows may write, padded on the right, `[lines, T]`.
    """

    copying: WithPromptLookup
    known: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.long))

    model = shared_nodes = without_text = None
    nodes = property(lambda self: self.copying.nodes)
    depth = property(lambda self: self.copying.depth)
    sizes = property(lambda self: self.copying.sizes)
    scratch_slots = property(lambda self: self.copying.scratch_slots)

    def propose(self, state: State, *args: Any) -> Tree:
        tree = self.copying.without_text.propose(state, *args)
        lines = script_of_rows(self.known, state)
        index = state.length[:, None] + 1 + torch.arange(tree.levels + self.copying.draft_len)
        return graft(tree, lines.gather(1, index.clamp(max=lines.shape[1] - 1)))


def beside_text(engine: ReDrafter) -> ReDrafter:
    """Add what the text says to the drafts of every step of an engine, whatever these cost and gain."""
    both = Grafted(WithPromptLookup(engine.proposer, 3))
    engine.proposer_for = lambda rows: both
    engine.pauses = False
    return engine


def head(model: PreTrainedModel) -> Any:
    return random_head(**EAGLE_FORMS["published"], **sized(model))


def blocks(form: str, model: PreTrainedModel) -> Any:
    return random_block_drafter(**DFLASH_FORMS[form], **sized(model))


def with_mtp(model: PreTrainedModel, options: EngineOptions, shape: TreeShape) -> ReDrafter:
    target = bound(model)
    return ReDrafter(target, random_mtp(target), shape, options=options)


def recycled(model: PreTrainedModel, options: EngineOptions, shape: TreeShape) -> ReDrafter:
    target = bound(model)
    return ReDrafter(target, new_table(target).placed(target), shape, options=options)


ENGINES: dict[str, Callable[[PreTrainedModel, EngineOptions], Engine]] = {
    "undrafted": lambda model, options: Engine(bound(model), UndraftedProposer(), options),
    "prompt lookup": lambda model, options: Engine(bound(model), WithPromptLookup(UNDRAFTED, 4, 2), options),
    "drafter": lambda model, options: recurrent(model, options, TreeShape(4, 4, 999)),
    "drafter's chain": lambda model, options: recurrent(model, options, TreeShape(1, 4, 999)),
    "context": lambda model, options: recurrent(model, options, TreeShape(4, 3, 999), context_drafter(**sized(model))),
    "drafter and text": lambda model, options: beside_text(recurrent(model, options, TreeShape(3, 3, 6))),
    "shared nodes": sharing,
    "EAGLE": lambda model, options: recurrent(model, options, TreeShape(4, 3, 999), head(model)),
    "EAGLE and text": lambda model, options: beside_text(recurrent(model, options, TreeShape(1, 3, 999), head(model))),
    "EAGLE's chain": lambda model, options: recurrent(model, options, TreeShape(1, 4, 999), head(model)),
    "EAGLE's shared nodes": lambda model, options: sharing(model, options, head(model)),
    "DFlash": lambda model, options: recurrent(model, options, TreeShape(4, 3, 999), blocks("DFlash", model)),
    "DSpark": lambda model, options: recurrent(model, options, TreeShape(4, 3, 999), blocks("DSpark", model)),
    "DFlash2": lambda model, options: sharing(model, options, blocks("DFlash2", model)),
    "MTP": lambda model, options: with_mtp(model, options, TreeShape(4, 3, 999)),
    "MTP and text": lambda model, options: beside_text(with_mtp(model, options, TreeShape(1, 3, 999))),
    "recycled tokens": lambda model, options: recycled(model, options, TreeShape(4, 4, 999)),
    "draft model": draft_target,
    "draft model's tree": lambda model, options: draft_target(model, options, num_beams=3, node_budget=6),
    "other vocabulary": other_vocabulary,
}


def make_engine(name: str, model: PreTrainedModel | None = None, **options: Any) -> Engine:
    """Make an engine of that name on a model whose texts do not end by themselves; None for a new tiny Llama."""
    model = model or tiny_model("llama")
    model.generation_config.eos_token_id = None
    return ENGINES[name](model, EngineOptions(**{"draft_from_text": False} | options))


WATCHED: dict[str, Callable[[], AbstractContextManager]] = {
    "context": checked_windows,
    "EAGLE": checked_drafts,
    "EAGLE's chain": checked_drafts,
    "DFlash": checked_blocks,
    "DSpark": checked_blocks,
    "MTP": checked_layers,
}


@dataclass(eq=False)
class Pair:
    """A feature and an engine, and what these must write.

    Attributes:
        feature: The feature.
        name: The name of the engine.
        engine: The engine.
        with_adapters: The model by None, and PEFT's models by the names of adapters.
    """

    feature: Feature
    name: str
    engine: Engine
    with_adapters: dict[str | None, PreTrainedModel]

    def watched(self) -> AbstractContextManager:
        """Return a context in which what a drafter reads is compared with what the whole text gives."""
        return WATCHED.get(self.name, nullcontext)() if self.feature is FEATURES["text"] else nullcontext()

    @property
    def model(self) -> PreTrainedModel:
        return self.engine.model

    def batch(self) -> dict[str, Any]:
        """Return arguments of `generate` for four prompts of unequal length."""
        if self.feature.images:
            return prompts_with_images(self.model, UNEVEN)
        ids, mask = uneven_batch()
        return {"input_ids": ids, "attention_mask": mask}

    @cached_property
    def greedy_texts(self) -> Tensor | None:
        """Return what transformers writes of the batch, with PEFT's model of each row's adapter."""
        batch = self.batch()
        if self.feature.greedy == "plain":
            return None
        if self.feature.greedy == "alone":
            return generated_alone(self.model, batch["input_ids"], batch["attention_mask"], NEW)
        texts = {name: model.generate(**batch, **GREEDY) for name, model in self.with_adapters.items()}
        return torch.stack([texts[name][row] for row, name in enumerate(self.names)])

    @property
    def names(self) -> Sequence[str | None]:
        """The adapters of the batch's rows."""
        return ROWS if self.feature.adapters else (None,) * len(ROWS)

    @property
    def rows(self) -> dict[str, Any]:
        """Arguments of `generate` that name the rows' adapters."""
        return {"adapter": list(ROWS)} if self.feature.adapters else {}

    def expect(self, texts: Sequence[Sequence[int]]) -> None:
        """Let an engine that copies from texts copy from these, which are about to be written."""
        if isinstance(proposer := self.engine.proposer_for(1), Grafted):
            proposer.known = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)

    def sequences(self) -> list[TokenSequence]:
        """Return sequences of all kinds: some begin alike, some verify no drafts, some have adapters or images."""
        made, kinds = Random(4), list(KINDS.values())
        limits = (0, None, min(self.engine.proposer_for(1).depth, 1))
        beginnings = [[made.randrange(3, 90) for _ in range(40)] for _ in range(5)]
        sequences, texts = [], 0
        for number in range(14 if self.feature.images else 10):
            params = replace(kinds[number % len(kinds)], seed=number, num_speculative_tokens=limits[number % 3])
            if self.feature.images and number % 2:
                layout = (UNEVEN[0], UNEVEN[2], UNEVEN[3])[number // 2 % 3]
                sequences.append(seeing_sequence(self.engine, layout, number, params, count=50))
            else:
                prompt = beginnings[texts % 5] + [made.randrange(3, 90) for _ in range(made.randrange(1, 6))]
                sequences.append(make_sequence(prompt[20 * (texts % 5 == 1) :], made.randrange(12, 50), params))
                texts += 1
            name = ROWS[number % len(ROWS)] if self.feature.adapters else None
            if name is not None:
                change(sequences[-1], adapter=self.engine.target.adapters.hold(name))
        return sequences


@cache
def pair(feature: str, engine: str) -> Pair:
    """Return the pair of a feature and an engine; the same one for all tests."""
    made = FEATURES[feature]
    model = made.model().to(made.dtype)
    found = make_engine(engine, model, **made.options)
    with_adapters: dict[str | None, PreTrainedModel] = {None: model}
    if made.adapters:
        folder = Path(mkdtemp())
        for name, changes in ADAPTERS.items():
            if made.images:
                layers = (
                    r".*language_model.*\.(q_proj|v_proj|down_proj)" if name == "one" else r".*language_model.*o_proj"
                )
                with_adapters[name] = adapted(model=made.model(), seed=len(name), target_modules=layers)
                with_adapters[name].save_pretrained(folder / name)
            else:
                with_adapters[name], _ = saved(folder / name, **changes)
            found.load_adapter(name, folder / name)
    return Pair(made, engine, found, with_adapters)


@cache
def written_alone(feature: str) -> list[list[int]]:
    """Return what `generate` writes of each sequence alone, by an engine that never drafts."""
    made = pair(feature, "undrafted")
    sequences = made.sequences()
    texts = [alone(made.engine, sequence) for sequence in sequences]
    for sequence in sequences:
        if sequence.request.adapter is not None:
            made.engine.target.adapters.release(sequence.request.adapter)
    return texts


# Pairs that meet in a way of their own: how a prompt is read, or a state rolled back, depends on both.
OWN_WAYS = {
    ("images", name)
    for name in ("context", "EAGLE", "DFlash", "draft model", "other vocabulary", "prompt lookup", "recycled tokens")
}
OWN_WAYS |= {(feature, "draft model's tree") for feature in ("convolutions", "states", "fp8", "invariant")}
OWN_WAYS |= {("images", "drafter's chain")}
OWN_WAYS |= {("adapters", name) for name in ("prompt lookup", "draft model", "recycled tokens")}
OWN_WAYS |= {("convolutions", "drafter and text")}
# Those where either is the first of its kind.
SIMPLE = {("text", engine) for engine in ENGINES} | {(feature, "drafter") for feature in FEATURES}
# And what layers attend to, with all that drafts.
LAYERS = [name for name, feature in FEATURES.items() if not (feature.images or feature.adapters or feature.options)]
PAIRS = sorted(SIMPLE | OWN_WAYS | {(feature, engine) for feature in LAYERS for engine in ENGINES})
# Layers that are called in ways of their own, or have no keys; no checkpoint of theirs has an MTP layer.
NO_MTP = ("window", "chunks", "learned positions", "states", "convolutions", "sinks")
PAIRS = [of for of in PAIRS if of[0] not in NO_MTP or not of[1].startswith("MTP")]
# What these ask of a model another engine asks too, so they meet only some of the layers.
ALIKE = ("DSpark", "DFlash2", "MTP and text", "EAGLE and text", "drafter and text")
PAIRS = [of for of in PAIRS if of[1] not in ALIKE or of[0] in ("text", "latent keys", "convolutions", "states")]


def case(*names: str, fast: bool, own: bool = True) -> Any:
    """Return a parameter of these names, a variant unless it is fast.

    With `own`, a variant of `OWN_WAYS` is not marked as a `pair`.
    """
    marks = [] if fast else [pytest.mark.variant(own_way=own and names[:2] in OWN_WAYS)]
    return pytest.param(*names, id="-".join(names), marks=marks)
