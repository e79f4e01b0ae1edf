"""Refuse models that cannot be a target, and modes that change the output; derive the cache layout of others."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from redrafter.cache.dense import cache_in
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.states import StateShape
from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError, first_line
from redrafter.files.dtype_names import dtype_name
from redrafter.model.positions import has_alibi

MASKED_ATTENTIONS = ("eager", "sdpa")  # implementations that take a 4-D mask


@dataclass(frozen=True)
class Support:
    """States whether a model can be decoded in some way, and if not, the reason.

    Attributes:
        reason: Reason why it cannot, as the end of a sentence; None if it can.
    """

    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Return whether the model can be decoded in that way."""
        return self.reason is None


def name_model_in_errors(bind: Callable[..., None]) -> Callable[..., None]:
    """Wrap a target's `__init__` so that errors of a model's own code become an `UnsupportedError` naming the model.

    Errors of this library and out-of-memory errors are not wrapped.
    """

    @wraps(bind)
    def wrapped(self: object, model: PreTrainedModel, *args: object, **kwargs: object) -> None:
        try:
            bind(self, model, *args, **kwargs)
        except (ReDrafterError, MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            message = f"{type(model).__name__} cannot be a target: {type(error).__name__}: {first_line(error)}"
            raise UnsupportedError(message) from error

    return wrapped


def base_of(model: Any) -> Any:
    """Return the Hugging Face model inside a `PeftModel` or a result of `torch.compile`, or the model itself.

    Raises:
        UnsupportedError: The adapters are more than layers of that model (prompt tuning, X-LoRA, aLoRA, ...).
    """
    model = getattr(model, "_modules", {}).get("_orig_mod", model)  # our forwards are compiled separately
    peft = sys.modules.get("peft")  # an optional dependency: only a program that imported it has its models
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    tuner = model.base_model
    in_layers = isinstance(tuner, peft.tuners.tuners_utils.BaseTuner)
    in_layers = in_layers and type(tuner).forward is peft.tuners.tuners_utils.BaseTuner.forward
    configs = model.peft_config.values()
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        raise UnsupportedError(
            f"{type(model).__name__} has an activated LoRA (alora_invocation_tokens), which changes only the tokens "
            "after those that invoke it, which a step cannot express; use LoRA without alora_invocation_tokens"
        )
    if not in_layers:
        kinds = ", ".join(sorted({config.peft_type.value for config in configs}))
        raise UnsupportedError(
            f"{type(model).__name__} with {kinds} adapters is more than layers of its model; merge it with "
            "merge_and_unload(), or use adapters that stand in layers, such as LoRA"
        )
    return tuner.model


def check_supported(model: PreTrainedModel, name: str) -> None:
    """Check by the config that token trees can be verified on a model.

    Raises:
        UnsupportedError: It is an encoder-decoder, reads in both directions, has ALiBi in unknown code, has layers that
            attend to something else than the tokens of a sequence, or has an attention implementation without 4-D
            masks.
    """
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder-decoder; only decoder-only causal LMs can be verified as a tree")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedError(
            f"{name} reads its prompt in both directions (use_bidirectional_attention); "
            "only a model in which no token sees a later one can be verified as a tree"
        )
    attention = getattr(model.config, "_attn_implementation", "eager")
    if attention not in MASKED_ATTENTIONS:
        eager = not model._supports_sdpa or getattr(config, "attn_logit_softcapping", None) is not None
        right = "attn_implementation='eager'" if eager else "attn_implementation='sdpa' (or 'eager')"
        raise UnsupportedError(f"attn_implementation={attention!r} takes no tree mask; load the model with {right}")
    attends_to = None
    if not hasattr(config, "num_hidden_layers"):  # BLT, whose patches are between two stacks of layers
        attends_to = "its config counts no layers of one decoder (num_hidden_layers), as parts of it read other units"
    elif compressed := sorted({kind for kind in _layer_types(config) or () if "compress" in kind}):
        attends_to = f"its layers attend to blocks that past tokens are compressed to ({', '.join(compressed)})"
    # CPM-Ant; MVP's are no part of a sequence
    elif hasattr(config, "prompt_types") and (count := config.prompt_length):
        attends_to = f"it puts {count} places of its own before each text (prompt_length) and reads all of it each step"
    if attends_to is not None:
        raise UnsupportedError(
            f"{name} cannot be verified as a tree: {attends_to}; use a model whose layers attend to a text's tokens"
        )
    alibi = (getattr(part, "alibi", False) for part in (config, getattr(config, "attn_config", None)))
    named = any(alibi) or hasattr(model.get_decoder(), "build_alibi_tensor")
    if named and not any(map(has_alibi, model.modules())):
        raise UnsupportedError(
            f"{name} has ALiBi attention in custom code, whose bias follows from a token's slot in a 2-D mask; the "
            "nodes of a tree need separate positions, so load it without trust_remote_code if transformers knows it"
        )


def check_on_device(model: nn.Module, table: Tensor, name: str) -> None:
    """Check that a model has its weights, and its embedding table where a device can read it.

    Raises:
        UnsupportedError: They are on the meta device, and accelerate does not load them from elsewhere.
    """
    # accelerate loads the weights of modules with its hook just before they run.
    brought = {id(x) for module in model.modules() if hasattr(module, "_hf_hook") for x in module.parameters()}
    empty = (key for key, x in model.named_parameters() if x.is_meta and (x is table or id(x) not in brought))
    if (key := next(empty, None)) is not None:
        raise UnsupportedError(
            f"{name} is on the meta device, where weights have no numbers ({key}): load it with from_pretrained; where "
            "device_map leaves a part of it to the host's memory or disk, keep its embedding on a GPU or CPU"
        )


def check_states_found(model: PreTrainedModel, config: PretrainedConfig, name: str) -> None:
    """Check that a model with this decoder config, in which no recurrent state was found, has none.

    Raises:
        UnsupportedError: It keeps states elsewhere than in transformers' cache.
    """
    layer_types = _layer_types(config)
    stateful = {kind for kind in layer_types or () if "linear" in kind or not kind.endswith("attention")}
    # A class may be made for hybrids, and a model of it have only attention: its actual layers count.
    if stateful or (layer_types is None and getattr(model, "_is_stateful", False)):
        kinds = ", ".join(sorted(stateful)) or "recurrent"
        raise UnsupportedError(
            f"{name} has {kinds} layers, and does not keep their state in transformers' cache, so it cannot be rolled "
            "back to a branch of a tree; use a model whose layers are all attention, or one that keeps it there"
        )


def _layer_types(config: object) -> list[str] | None:
    """Return the type of each layer, or None where a config does not list them."""
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not listed:
        return None
    return ["full_attention" if kind == "attention" else kind for kind in listed]  # an older name


def stored_shapes(
    output: object, config: PretrainedConfig, name: str, states: Sequence[StateShape] = ()
) -> list[LayerShape]:
    """Return the shape of each layer, by the cache in the output of a causal forward and the states of all layers.

    Raises:
        UnsupportedError: The model stores something else than keys and values and these states.
    """
    past = cache_in(output)
    if past is None and getattr(config, "is_decoder", None) is False:
        raise UnsupportedError(f"{name} is not a decoder: its tokens see later ones; load it with is_decoder=True")
    layers = getattr(past, "layers", None)
    if layers is None:
        kept = "no keys and values of past tokens" if past is None else f"past tokens in its {type(past).__name__}"
        raise UnsupportedError(f"{name} keeps {kept}; only models with an ordinary cache can be verified as a tree")
    by_layer = {index: tuple(state for state in states if state.layer == index) for index in range(len(layers))}
    shapes = dict[int, LayerShape]()
    for index, layer in enumerate(layers):
        keys = getattr(layer, "keys", None)
        values = getattr(layer, "values", None)
        if keys is None and by_layer[index]:
            first = by_layer[index][0]
            shapes[index] = LayerShape(
                heads=0, key_dim=0, value_dim=0, dtype=first.dtype, device=first.device, states=by_layer[index]
            )
            continue
        # A layer that attends to an earlier layer's keys, or only to images, stores nothing.
        if keys is None and hasattr(layer, "keys") and not any(isinstance(x, Tensor) for x in vars(layer).values()):
            continue
        if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == values.dim() == 4):
            raise UnsupportedError(f"layer {index} of {name} keeps no keys and values ({type(layer).__name__})")
        index_keys = getattr(layer, "indexer_keys", None)  # [B, T, dim]
        widths, extra = (keys.shape[3], values.shape[3]), 0 if index_keys is None else index_keys.shape[-1]
        kind = keys.shape[1], *widths, keys.dtype, keys.device
        shapes[index] = LayerShape(*kind, extra_dim=extra, states=by_layer[index])
    if not shapes:
        raise UnsupportedError(f"no layer of {name} keeps keys and values")
    nothing = next(iter(shapes.values())).storing_nothing()
    return [shapes.get(index, nothing) for index in range(len(layers))]


def config_width(config: PretrainedConfig) -> int:
    """Return D by a config: the width of the layers, or what OPT projects their input and output to."""
    return getattr(config, "word_embed_proj_dim", None) or config.hidden_size


def check_eval(model: nn.Module) -> None:
    """Check that a model is in eval mode; in training mode, dropout would change the text.

    Raises:
        ArgumentError: A part of it is in training mode; the message names the first one.
    """
    part = next((name for name, module in model.named_modules() if module.training), None)
    if part is not None:
        where = f" (its {part})" if part else ""
        raise ArgumentError(
            f"{type(model).__name__} is in training mode{where}, where dropout draws at random; call model.eval() first"
        )


def check_autocast(device: torch.device) -> None:
    """Check that `torch.autocast` is off on a device; it would change the dtype of keys and values on the way.

    Raises:
        UnsupportedError: It is on.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = dtype_name(torch.get_autocast_dtype(device.type))
        message = f"a model cannot be verified under torch.autocast; leave it, and load the model with dtype={dtype!r}"
        raise UnsupportedError(message)
