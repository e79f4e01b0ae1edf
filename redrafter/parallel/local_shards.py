"""Replace transformers' layers for tensor parallelism by layers of our own.

transformers loads only each rank's shard of every weight, which saves memory and time, and wraps forwards of modules to
use distributed tensors. Only its shards are kept, as plain tensors in plain layers: these can be fused, compiled and
captured in a CUDA graph like those of a model in one process, and collectives are few and explicit.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from redrafter.errors import UnsupportedError
from redrafter.parallel.ranks import ALONE, Ranks

# Styles of transformers' plans, grouped by how a module with the style is replaced.
_LOCAL = ("colwise", "packed_colwise")
_SUMMED = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}  # and whether the input is whole
_GATHERED = ("colwise_gather_output", "colwise_rep")
_WHOLE = ("embedding_rowwise", "embedding_colwise")
_SUMMED_OUTPUT = ("moe_tp_experts", "all_reduce")
_AS_IT_IS = ("replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj", "local_params")


@dataclass(frozen=True)
class Shard:
    """This rank's part of a weight of the whole model.

    Attributes:
        name: Name of the part in the `state_dict` of the rank's model.
        shape: Shape of the whole weight.
        dim: Dimension that is split.
        blocks: Number of equal blocks of the dimension, each of which is split, such as a gate and an up projection.
        first: Index of the part's first entry in a block.
        count: Entries of the part in a block.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    blocks: int
    first: int
    count: int

    @classmethod
    def of_rank(
        cls, name: str, whole: Sequence[int], part: Sequence[int], dim: int, blocks: int, ranks: Ranks
    ) -> "Shard":
        """Find a rank's part from the shapes of the whole weight and of the part."""
        size, count = whole[dim] // blocks, part[dim] // blocks
        share = -(-size // ranks.size)
        first = min(ranks.rank * share, size)
        if count != min(share, size - first):  # a head that several ranks have
            first = ranks.rank * (size // count) // ranks.size * count
        return cls(name, tuple(whole), dim, blocks, first, count)

    def cut(self, whole: Tensor) -> Tensor:
        """Return the part of a whole weight, which may share its memory."""
        blocks = whole.unflatten(self.dim, (self.blocks, -1))
        return blocks.narrow(self.dim + 1, self.first, self.count).flatten(self.dim, self.dim + 1)


class SplitLinear(nn.Module):
    """A linear layer split into one shard per rank; its output is the same on every rank, bit for bit.

    Attributes:
        ranks: The ranks.
        part: This rank's layer.
    """

    def __init__(self, layer: nn.Linear, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks):
        """Make this rank's layer: `layer` is the whole one, for its sizes and mode; weight and bias are this rank's."""
        super().__init__()
        self.ranks, self.in_features, self.out_features = ranks, layer.in_features, layer.out_features
        self.part = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.part.weight = weight
        self.part.register_parameter("bias", bias)
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """This rank's shard of the weight, whose dtype and device models read."""
        return self.part.weight


class SummedLinear(SplitLinear):
    """A linear layer with split input features: the outputs of all ranks are added.

    Attributes:
        bias: Added once, after the sum, `[O]`; None for none.
        splits: Whether the input has the features of all ranks, `[..., I]`, from which this rank takes its own.
    """

    def __init__(self, layer: nn.Linear, weight: nn.Parameter, bias: nn.Parameter | None, ranks: Ranks, splits: bool):
        """Make the layer of this rank from its columns of the weight, `[O, I_r]`, and the whole bias."""
        super().__init__(layer, weight, None, ranks)
        self.splits, self.bias = splits, bias
        self.first = -(-layer.in_features // ranks.size) * ranks.rank  # of this rank's features

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole layer, `[..., O]`."""
        if self.splits:
            # Each rank takes the features that its columns of the weight multiply.
            x = x.narrow(-1, self.first, self.part.in_features)
        # The bias is added after the sum, or each rank would add it once.
        out = self.ranks.sum(self.part(x))
        return out if self.bias is None else out + self.bias


class GatheredLinear(SplitLinear):
    """A linear layer with split output features: the outputs of all ranks are concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole layer, `[..., O]`."""
        # the last rank may have fewer features
        padding = -(-self.out_features // self.ranks.size) - self.part.out_features
        return self.ranks.join_last(pad(self.part(x), (0, padding)))[..., : self.out_features]


def use_local_shards(model: PreTrainedModel) -> Ranks:
    """Let a causal LM that transformers has split compute by layers of our own, and return its ranks.

    Collective for a split model: call it on every rank. A model in one process is unchanged. Raises `UnsupportedError`
    for an unknown kind of split.
    """
    for module in model.modules():
        if isinstance(module, SplitLinear):
            return module.ranks
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return ALONE
    ranks, plan = Ranks.of_world(), dict(model.tp_plan)
    modules = [(name, x, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))) for name, x in model.named_modules()]
    for _, module, style in modules:
        if style is not None:
            vars(module).pop("forward", None)  # removes transformers' wrapper, which hides the class's forward
    # By name, the shape of each weight that is split, the dimension, and the blocks of it.
    divided: dict[str, tuple[Sequence[int], int, int]] = {}
    tables: dict[int, nn.Parameter] = {}  # whole embedding tables, by id of the split parameter
    for _, module, style in modules:  # before other modules, as a head may share a table's weight
        if style in _WHOLE:
            split = module.weight
            with torch.no_grad():
                whole = split.full_tensor() if hasattr(split, "full_tensor") else split  # collective
            tables[id(split)] = module.weight = _parameter(whole, split)
    for name, module, style in modules:
        for key, parameter in module.named_parameters(recurse=False):
            placement: Any = parameter.placements[0] if hasattr(parameter, "placements") else None
            if style not in _WHOLE and hasattr(placement, "dim"):
                divided[f"{name}.{key}"] = parameter.shape, placement.dim, getattr(placement, "split_factor", 1)
            elif style in _GATHERED:  # rows of a whole table
                divided[f"{name}.{key}"] = parameter.shape, 0, 1
            if id(parameter) in tables:
                setattr(module, key, tables[id(parameter)])
            elif hasattr(parameter, "to_local"):
                of_keys = name.endswith((".k_proj", ".v_proj")) and style in _LOCAL
                local = own_heads(model, name, key, parameter, ranks) if of_keys else parameter.to_local()
                setattr(module, key, _parameter(local, parameter))
        if style is not None:
            _replace(model, name, module, style, ranks)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise UnsupportedError(
                f"{name} of {type(model).__name__} is split, and its plan has no rule for the module that uses it: "
                "load the model by name with tp_size"
            )
    own, shards = dict(model.named_parameters(remove_duplicate=False)), dict[str, Shard]()
    for name, (shape, dim, blocks) in divided.items():
        module_name, _, key = name.rpartition(".")
        place = name if name in own else f"{module_name}.part.{key}"
        shards[name] = Shard.of_rank(place, shape, own[place].shape, dim, blocks, ranks)
    vars(model)["shards_of_rank"] = shards
    return ranks


def shards_of(model: nn.Module) -> Mapping[str, Shard]:
    """Return this rank's parts of weights by their names in the whole model, without weights that it has whole."""
    shards: Mapping[str, Shard] = vars(model).get("shards_of_rank", {})
    return shards


def cut_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return this rank's parts of a whole model's weights, by the names of the rank's model.

    Weights of another shape, and those of a model that no ranks share, are returned as they are.
    """
    shards = shards_of(model)
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {}) if shards else {}
    # Rows of a table are a parameter of their own on a rank.
    tied = {name: weights[ties[name]] for name in shards if name not in weights and ties.get(name) in weights}
    return {
        name if (shard := shards.get(name)) is None else shard.name: (
            weight if shard is None or tuple(weight.shape) != shard.shape else shard.cut(weight)
        )
        for name, weight in {**weights, **tied}.items()
    }


def own_heads(model: nn.Module, name: str, key: str, parameter: Any, ranks: Ranks) -> Any:
    """Return the rows of whole key-value heads of a weight or bias that this rank attends with.

    Where there are fewer heads than ranks, neighbouring ranks have the same head; transformers' shard is a part of it.
    """
    attention: Any = model.get_submodule(name.rpartition(".")[0])
    width: int = getattr(attention, "head_dim", parameter.shape[0] // ranks.size)
    heads, local = parameter.shape[0] // width, parameter.to_local()
    if heads % ranks.size == 0:
        return local
    if ranks.size % heads:
        message = f"{name} has {heads} heads, which {ranks.size} ranks cannot share: take {heads} or fewer"
        raise UnsupportedError(message)
    if name.endswith(".k_proj") and key == "weight":  # once for each layer
        attention.num_key_value_groups = attention.num_key_value_groups * heads // ranks.size
    first = ranks.rank * heads // ranks.size * width
    whole = parameter.full_tensor()  # collective
    return whole[first : first + width].clone()


def _replace(model: PreTrainedModel, name: str, module: nn.Module, style: str, ranks: Ranks) -> None:
    """Replace a module, which has this rank's parts of its weights, by one that computes what its style says."""
    if style in _SUMMED_OUTPUT:
        module.register_forward_hook(lambda _, args, output: ranks.sum(output))
    elif style == "moe_identity_expert":
        # Every rank adds the identity expert's output to a sum over ranks.
        module.register_forward_pre_hook(lambda _, args: (args[0] / ranks.size, *args[1:]))
    elif style in _AS_IT_IS or style in _WHOLE:
        return
    elif type(module) is not nn.Linear or style not in (*_LOCAL, *_SUMMED, *_GATHERED):
        raise UnsupportedError(
            f"{type(model).__name__} splits {name}, a {type(module).__name__}, in the style {style!r}, which is not "
            "supported here; load it in one process, without tp_size"
        )
    elif style in _LOCAL:
        module.out_features = len(module.weight)
    elif style in _GATHERED:
        rows = module.out_features
        count = -(-rows // ranks.size)
        # The last ranks may have fewer rows, or none.
        first = min(count * ranks.rank, rows)
        # A parameter that is also an embedding table is whole here.
        both: tuple[Any, Any] = (module.weight, module.bias)
        weight, bias = (x if x is None or len(x) != rows else _parameter(x[first : first + count], x) for x in both)
        model.set_submodule(name, GatheredLinear(module, weight, bias, ranks))
    else:
        part: Any = module.weight
        model.set_submodule(name, SummedLinear(module, part, module.bias, ranks, splits=_SUMMED[style]))


def _parameter(x: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(x.detach(), requires_grad=like.requires_grad)
