"""The base class of all drafters, which loads a checkpoint whole or not at all, and a product that they share."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from redrafter.cache.kv_cache import LayerShape
from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.drafting.head_part import HeadPart
from redrafter.drafting.low_rank import LowRankLinear
from redrafter.drafting.proposer import PricedDrafter, SearchProposer
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.atomic_file import share_weights
from redrafter.files.checkpoint_kind import check_drafter, check_source, download, load_error, read_json
from redrafter.files.dtype_names import dtype_name
from redrafter.files.stored_tensors import read_directory
from redrafter.kernels.grouped_linear import is_fast, multiply_grouped
from redrafter.kernels.grouped_weight import BLOCK, GroupedWeight
from redrafter.kernels.linear_operators import has_thin_kernel, thin_linear
from redrafter.model.forward_batch import DrafterLayer, LogitsReader
from redrafter.model.packed_weights import widen_packed
from redrafter.model.quantized_layers import QuantizedLinear, check_saved, round_to_groups
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import PartOfScores

# Of Apple's checkpoints, and of heads in two stages, which earlier versions could make of the whole head that follows.
UNUSED_TENSORS = ("emb_norm.weight", "shortlist.")
MIN_ROUNDED_WEIGHTS = 1 << 22  # of a head that a CPU reads in 8 bits; smaller heads stay in its caches
MAX_ROUNDED_INPUTS = 32  # of such a head at once; for more, arithmetic takes longer than reading the weight
HUB_OPTIONS = {"cache_dir", "force_download", "local_files_only", "revision", "token"}


class FusedParts(nn.Module):
    """Products that are computed as one where the engine has fused their weights."""

    def fuse(self) -> None:
        """Make one product of those that read the same tensor, of the current weights."""
        raise NotImplementedError

    def unfuse(self) -> None:
        """Compute the products one by one, as a training needs them."""
        raise NotImplementedError


class DrafterModel(PricedDrafter, PreTrainedModel):
    """A drafter with its weights. A subclass defines the class of its config, and how it drafts.

    Attributes:
        made_from_config: Whether a config is enough to make one, so that it can be trained and converted.
        proposer_class: Class of its proposer.
        unquantized: Submodule that is not quantised with the drafter; None for none.
        int8_head: The head's weight in 8 bits, for drafts on a CPU, after `prepare`; None if it is used unchanged.
        splits_head: Whether ranks that share a target divide the head: its proposer then calls `draft_scores`.
        head_part: The part of the head that this rank computes, after `prepare`; None for all.
        embed_tokens: The drafter's own embedding table; None for the target's.
    """

    config: AnyDrafterConfig
    config_class: type[AnyDrafterConfig]
    made_from_config: ClassVar[bool] = True
    proposer_class: ClassVar[type[SearchProposer]]
    main_input_name = "embedding"
    base_model_prefix = "drafter"
    unquantized: nn.Module | None = None
    int8_head: GroupedWeight | None = None
    splits_head: ClassVar[bool] = False
    head_part: HeadPart | None = None

    @property
    def logits_reader(self) -> LogitsReader | None:
        """Return the reader that stores the logits of each step for later drafts; None where drafts read none."""
        return None

    def forget_texts(self) -> None:
        """Forget earlier texts: only a table of their tokens keeps any state of them."""

    def __init__(self, config: AnyDrafterConfig):
        """Make a drafter with random weights; a subclass adds its parts.

        Args:
            config: The architecture.

        Raises:
            ArgumentError: No drafter can have the config's values.
        """
        config.check()
        super().__init__(config)
        self.embed_tokens: nn.Embedding | None = None
        self.register_buffer("draft_ids", None if (ids := config.draft_vocab_size) is None else torch.arange(ids))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the drafter as transformers does, in files with the umask's permissions."""
        check_saved(self, "the drafter")
        super().save_pretrained(save_directory, *args, **kwargs)
        share_weights(Path(save_directory))

    def layers_read(self, target: Target) -> list[int]:
        """Return the target's decoder layers whose outputs the drafter reads."""
        return self.config.target_layers_of(getattr(target.config, "num_hidden_layers", 0))

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer | None:
        """Return the layer that the drafter stores, or None; compiled by torch.compile if asked and possible."""
        return None

    def proposer(
        self, target: Target, beams: int, depth: int, nodes: int, shared_nodes: int | None, compiled: bool
    ) -> SearchProposer:
        """Return a proposer that drafts with the drafter; the arguments are the attributes of `SearchProposer`.

        Raises as `check_search` does.
        """
        self.check_search(target, depth)
        return self.proposer_class(self, target, beams, depth, nodes, shared_nodes, compiled)

    def check_search(self, target: Target, depth: int) -> None:
        """Raise `UnsupportedError` for a target, or `ArgumentError` for a depth, that it cannot draft with."""

    def placed(self, target: Target) -> "DrafterModel":
        """Return the drafter on a target's device, in its dtype, in evaluation mode."""
        module: Any = self
        return module.to(target.device, target.dtype).eval()

    def share_embedding(self) -> None:
        """Drop the drafter's own embedding table, so that it uses the target's; raise `ArgumentError` if it cannot."""
        if self.embed_tokens is None:
            raise ArgumentError("base_embedding: the drafter has no embedding table of its own; leave it out")
        self.config.own_embedding = False
        self.config.check()  # the widths may differ
        self.embed_tokens = None

    def prepare(self, target: Target) -> None:
        """Precompute tables of the current weights that make drafting for a target faster on its device."""
        head = getattr(self, "lm_head", None)
        self.head_part = HeadPart.of_rank(head, self.draft_ids, target.ranks) if self.splits_head else None
        self.int8_head = round_head(head if self.head_part is None else self.head_part.layer)
        for part in self._fused_parts():
            part.fuse()

    def _fused_parts(self) -> Iterator[FusedParts]:
        return (module for module in self.modules() if isinstance(module, FusedParts))

    def train(self, mode: bool = True) -> "DrafterModel":
        """Set training or evaluation mode; training drops what `prepare` computed."""
        if mode:
            self.int8_head = self.head_part = None
            for part in self._fused_parts():
                part.unfuse()
        return super().train(mode)

    def score(self, x: Tensor) -> Tensor:
        """Return logits `[..., V']` of the head's inputs `[..., R]`, as drafts need them; with `head_part`, its own."""
        rounded = self.int8_head
        if rounded is not None and x.numel() <= MAX_ROUNDED_INPUTS * x.shape[-1]:
            return multiply_grouped(x.float(), rounded.codes, rounded.scale, rounded.minimum, None)
        logits: Tensor = (self.lm_head if self.head_part is None else self.head_part.layer)(x)
        return logits

    def draft_scores(self, logits: Tensor, sampler: Sampler, noise: Tensor | None, step: int) -> Tensor | PartOfScores:
        """Return the logits of `score` as scores of a search, adjusted to the target's draw as a sampler does."""
        part = self.head_part
        if part is None:
            return sampler.draft_scores(logits, noise, step, self.draft_ids)
        scores = sampler.draft_scores(logits, noise, step, part.names)
        return PartOfScores(scores, part.first, self.lm_head.out_features, part.ranks)

    def part_reads(self, depth: int) -> Mapping[str, float]:
        """Return how often a draft reads parts of the drafter: of a head in 8 bits, or of several ranks, its share."""
        head: Any = getattr(self, "lm_head", None)
        if head is None:
            return {"embed_tokens.": 0}
        part: Any = head if self.head_part is None else self.head_part.layer
        rounded = self.int8_head
        num_bytes = part.weight.nbytes if rounded is None else rounded.codes.nbytes + rounded.scale.nbytes
        return {"embed_tokens.": 0, "lm_head.": depth * num_bytes / head.weight.nbytes}

    def index_ids(self) -> Tensor:
        """Return the drafter's id of each of the target's ids, `[V]` int64; -1 for ids that it does not have."""
        every = torch.arange(self.config.vocab_size, device=self.device)
        if self.draft_ids is None:
            return every
        return torch.full_like(every, -1).index_copy_(0, self.draft_ids, every[: len(self.draft_ids)])

    @classmethod
    def from_pretrained(cls, name: Any, *args: object, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load a drafter, and refuse a checkpoint that does not hold exactly its tensors.

        `PreTrainedModel.from_pretrained` would fill missing tensors with random weights.

        Args:
            name: A directory or the name of a repository on the Hugging Face hub.
            args: As in `PreTrainedModel.from_pretrained`.
            kwargs: As in `PreTrainedModel.from_pretrained`.

        Raises:
            CheckpointError: Files are missing or truncated, or hold other tensors or another type of drafter.
        """
        subfolder, hub = kwargs.pop("subfolder", ""), {key: kwargs.pop(key) for key in HUB_OPTIONS & kwargs.keys()}
        source = Path(name, subfolder)
        if not Path(name).is_dir():
            check_source(str(name))
            patterns = [os.path.join(subfolder, pattern) for pattern in ("*.json", "*.safetensors")]
            # The config is checked before the weights are downloaded, which may be those of a base.
            cls._read_config(download("drafter", name, patterns[:1], **hub) / subfolder)
            source = download("drafter", name, patterns, **hub) / subfolder
        content = cls._read_config(source)
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # reported below with other differences
        # transformers would map files, which may change while it runs.
        kwargs["state_dict"] = widen_packed(read_directory(source), content.get("quantization_config"), source)
        kwargs.setdefault("config", str(source))
        try:
            loaded: Any = super().from_pretrained(None, *args, output_loading_info=True, **kwargs)
        except Exception as error:
            if isinstance(error, ArgumentError):
                raise
            raise load_error("drafter", source, error) from error
        model, info = loaded
        model.config.name_or_path = model.name_or_path = str(name)
        refuse_differences(info, name)
        return (model, info) if wants_info else model

    @classmethod
    def _read_config(cls, source: Path) -> dict[str, Any]:
        """Return the config of a directory; raise `CheckpointError` if it is not that of a drafter of this type."""
        check_drafter(source)
        content, wanted = read_json(source / "config.json"), cls.config_class.model_type
        if (found := content.get("model_type")) != wanted:
            raise CheckpointError(f"{source} is a drafter of the type {found}, not {wanted}")
        return content


def refuse_differences(info: Mapping[str, Any], name: object) -> None:
    """Raise `CheckpointError` for tensors that transformers has not found, not expected or not been able to load."""
    shapes = [f"{key} of shape {tuple(x)} instead of {tuple(y)}" for key, x, y in info["mismatched_keys"]]
    extra = [key for key in info["unexpected_keys"] if not key.startswith(UNUSED_TENSORS)]
    wrong = {"missing keys": info["missing_keys"], "unexpected keys": extra, "mismatched keys": shapes}
    for what, names in wrong.items():
        if names:
            raise CheckpointError(f"{name} does not hold this drafter: {what} {', '.join(sorted(names))}")


def round_head(head: nn.Module | None) -> GroupedWeight | None:
    """Return the weight of a head in 8 bits, for drafts on a CPU; None for a small head, or without a fast product.

    Each level of a search reads the whole head, which takes most of a draft's time. With 49,152 ids of 512 features in
    float32 and five beams, one core takes 25.9 ms with AVX2 and 19.9 ms with AVX-512, and 7.1 and 4.1 ms in 8 bits.
    Rounding affects only drafts, not the output, as the target verifies them.
    """
    if type(head) is not nn.Linear or head.bias is not None or head.weight.numel() < MIN_ROUNDED_WEIGHTS:
        return None
    if head.weight.device.type != "cpu" or head.in_features % BLOCK or not is_fast("cpu"):
        return None
    return round_to_groups(head.weight.detach(), 8)


def check_draft_ids(
    ids: Tensor | None, size: int | None, vocab_size: int, name: object, what: str = "draft_ids"
) -> None:
    """Raise `CheckpointError` unless `ids` are different ids of the base, one for each of the drafter's own.

    Otherwise siblings of a tree could be the same token, or a node no token of the base.

    Args:
        ids: The base's id of each of the drafter's ids, `[V']` int64; None where it has all ids of its base.
        size: V', or None likewise.
        vocab_size: V, ids of the base.
        name: Name of the drafter in messages.
        what: Name of the ids there.
    """
    count, wanted = (0 if ids is None else ids.numel()), size or 0
    if count != wanted:
        raise CheckpointError(f"{name} has {what} of {count} ids instead of {wanted}")
    if ids is None:
        return
    if ids.dtype != torch.int64:
        raise CheckpointError(f"{name} has {what} as {dtype_name(ids.dtype)}; ids are int64")
    if len(outside := ids[(ids < 0) | (ids >= vocab_size)]):
        raise CheckpointError(f"{name} has {what} outside of the {vocab_size} ids of its base, such as {outside[0]}")
    found, counts = ids.unique(return_counts=True)
    if len(found) < count:
        again = found[counts.argmax()]
        raise CheckpointError(f"{name} has {what} that are not different ids of its base: {again} occurs twice")


def drafter_layer(
    drafter: DrafterModel,
    target: Target,
    heads: int,
    width: int,
    remember: Callable[..., tuple[Tensor, Tensor]],
    carry: Callable[[Tensor, Tensor], Tensor] | None = None,
    extra_dim: int = 0,
    *,
    compiled: bool = False,
) -> DrafterLayer:
    """Return the layer of `heads` keys and values that `remember` computes of every token of a target.

    `carry` and `extra_dim` say what a token leaves for that of the next one, as in `DrafterLayer`. Both functions may
    be `compiled`.
    """
    if compiled:
        remember, carry = for_any_tokens(remember), None if carry is None else for_any_tokens(carry)
    shape = LayerShape(heads, width, width, target.dtype, target.device, of_drafter=True, extra_dim=extra_dim)
    return DrafterLayer(drafter, shape, remember, carry)


def for_any_tokens(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `[T, ...]` tensors that calls a compiled one, so that one compilation serves any T.

    A single token is computed twice: a size of 1 has code of its own, which took seconds to compile for the first
    undrafted step of one row.
    """

    def compute_marked(*by_token: Tensor) -> Any:
        single = len(by_token[0]) == 1
        # Ids and positions may be views of a larger buffer, whose strides a compilation would depend on.
        given = [torch.cat([x, x]) if single else x.contiguous() if x.dim() == 1 else x for x in by_token]
        mark_dynamic(given, 0)
        made = compute(*given)
        if not single:
            return made
        return made[:1] if isinstance(made, Tensor) else tuple(x[:1] for x in made)

    return compute_marked


def partial_linear(layer: nn.Linear, x: Tensor, columns: slice, *, with_bias: bool) -> Tensor:
    """Return the product of a layer's weight with some of its input features, `[..., F]`.

    Without gradients, it uses the kernel for few tokens if possible.

    Args:
        layer: The layer, quantised or not, with a low-rank update or without.
        x: Those input features, `[..., d]`.
        columns: Their indices among all input features.
        with_bias: Whether to add the layer's bias.
    """
    bias = layer.bias if with_bias else None
    if isinstance(layer, QuantizedLinear):
        return layer.multiply(x, columns, bias)
    weight = layer.weight[:, columns]
    if isinstance(layer, LowRankLinear):
        return linear(x, weight, bias) + layer.update(x, columns)
    if torch.is_grad_enabled() or not has_thin_kernel(weight):
        return linear(x, weight, bias)
    product: Tensor = thin_linear(x, weight)
    return product if bias is None else product + bias


@cache
def compile_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function compiled with options of torch's compiler, once for all proposers.

    Its callers mark which sizes vary: with `dynamic=True` numbers of a config would vary too. A size of 1 has code of
    its own in any case. Such a function calls `torch.unflatten`: Dynamo cannot trace the method of tensors where the
    program has called `torch.set_default_device`.
    """
    return torch.compile(function, options=options or None)


def mark_dynamic(tensors: Iterable[Tensor | None], *dims: int) -> None:
    """Mark dimensions of tensors whose sizes vary from call to call of a compiled function; None has no sizes."""
    for x in tensors:
        if x is not None:
            torch._dynamo.maybe_mark_dynamic(x, dims)
