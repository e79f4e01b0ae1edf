"""Images in prompts: the inputs of a model's forward for them, in addition to the ids.

transformers' own `generate` prepares a call: it lets the model encode the images and count positions. This module
splits the result by rows, so that each row can be read alone. After its last prompt token, such a row is decoded like
any other, except for its positions: where an image has fewer positions than tokens, all following ones are shifted.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils.generic import ModelOutput

from redrafter.cache.kv_cache import KVCache
from redrafter.cache.paged import RoundingCache
from redrafter.errors import ArgumentError, UnsupportedError, first_line
from redrafter.features import IMAGES
from redrafter.model.self_test import CacheSupport
from redrafter.model.supported import Support
from redrafter.model.tree_forward import BoundModel

Prepared: TypeAlias = Mapping[str, Any]  # inputs of a model, by transformers
ENCODED = "mm_encoder_outputs"  # the forward's argument for encoded images, by kind
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
_UNKNOWN_FORM = "the model adds images to its layers in a form that is not known here; pass text alone"
# What a model's generation config may say of draws, while a call is prepared and nothing is drawn.
_NO_DRAWS: dict[str, object] = {
    **dict.fromkeys(("max_new_tokens", "num_beams", "num_return_sequences"), 1),
    **dict.fromkeys(("max_length", "stop_strings", "temperature", "top_p", "top_k")),
    "do_sample": False,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class ImagePrompt:
    """Inputs of a model's forward for one prompt with images, in addition to its ids.

    Attributes:
        length: Tokens of the prompt.
        inputs: Keyword arguments of the forward: the encoded images, positions and types of tokens.
        position_shift: Offset from the index of a later token in its sequence to its position.
    """

    length: int
    inputs: Mapping[str, object]
    position_shift: int = 0

    def prepare(self, model: PreTrainedModel, ids: Sequence[int]) -> "ImagePrompt":
        """Return the prompt itself, whose images are encoded already."""
        return self


@dataclass
class ImageInputs:
    """Images of one prompt as returned by the model's processor. Several sequences may share the prompt.

    Attributes:
        inputs: Keyword arguments of `generate` other than ids and mask, such as `pixel_values`.
    """

    inputs: Mapping[str, object]
    _prompt: ImagePrompt | None = field(default=None, init=False, repr=False)

    def prepare(self, model: Any, ids: Sequence[int]) -> ImagePrompt:
        """Let the model encode the images, in the first call; `ids` are the prompt, the same in each call.

        Raises `ArgumentError` if the images do not fit the prompt or the model.
        """
        if self._prompt is not None:
            return self._prompt
        prepared: dict[str, object] = {}

        def keep(model: PreTrainedModel, input_ids: Tensor, **inputs: object) -> Tensor:
            prepared.update(inputs)
            return input_ids

        device = model.get_input_embeddings().weight.device
        prompt = torch.tensor([list(ids)], device=device)
        given = {name: to_model(value, device) for name, value in self.inputs.items()}
        try:
            # `custom_generate` ends the call after its preparation, so the model encodes and decodes nothing else.
            asked = {"attention_mask": torch.ones_like(prompt), "custom_generate": keep}
            model.generate(prompt, **asked, **_NO_DRAWS, **given)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "CUDA" in str(error):
                raise  # such errors are not caused by the images
            raise ArgumentError(f"the model cannot read these images: {first_line(error)}") from error
        [row] = split_rows(prepared, prompt, torch.ones_like(prompt, dtype=torch.bool), model)
        if row is None:
            raise ArgumentError("the request has images, and its prompt has no place for one")
        self._prompt, self.inputs = row, {}  # pixels take several times the memory of the encoded images
        return row


def image_arguments(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of arguments of `generate` that give a model its images; none where it cannot take them here.

    They are the arguments of its method that encodes images, as in `generate` of transformers. The result of that
    method must be an argument of the model's forward.
    """
    encode = getattr(getattr(model, "base_model", None), "get_image_features", None)
    if encode is None or ENCODED not in inspect.signature(model.forward).parameters:
        return frozenset()
    return frozenset(inspect.signature(encode).parameters.keys() - {"kwargs"})


def marks_tokens(name: str, model: PreTrainedModel) -> bool:
    """Return whether 0 in an input of this name marks a token as text, and other numbers as a part of an image."""
    separate = model.config.get_text_config(decoder=True) is not model.config  # GPT-2 embeds its token_type_ids as ids
    return name.endswith("mm_token_type_ids") or (name == "token_type_ids" and separate)


def token_type_arguments(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of arguments of a model's forward that say which tokens are parts of images."""
    return frozenset(name for name in inspect.signature(model.forward).parameters if marks_tokens(name, model))


def split_rows(prepared: Prepared, ids: Tensor, seen: Tensor, model: PreTrainedModel) -> list[ImagePrompt | None]:
    """Return for each row what the forward takes of it alone, without padding; None for a row without images.

    Args:
        prepared: Keyword arguments that transformers would pass to the model for all rows.
        ids: The prompts, `[B, P]` int64, left-padded.
        seen: False where a row is padded, `[B, P]` bool.
        model: The Hugging Face model.

    Raises:
        ArgumentError: The prompts have placeholders for more or fewer images than there are.
        UnsupportedError: A prompt ends with an image, after which each axis would continue from its own position.
    """
    encoded = (prepared.get(ENCODED) or {}).get("image")
    if encoded is None:
        return [None] * len(ids)
    places = (ids == model.config.image_token_id) & seen  # [B, P]
    counts = places.sum(dim=1).tolist()
    features = _flat(encoded[_form(encoded)])
    if sum(counts) != len(features):
        raise ArgumentError(
            f"the images are encoded as {len(features)} tokens, and the prompts have {sum(counts)} places for them: "
            "pass what one call of the processor returned"
        )
    rows: list[ImagePrompt | None] = []
    first = 0
    for row, count in enumerate(counts):
        if not count:
            rows.append(None)
            continue
        size = int(seen[row].sum())
        inputs: dict[str, Any] = {ENCODED: {"image": _slice(encoded, slice(first, first + count))}}
        for name in ("position_ids", *_TOKEN_TYPES):
            if (value := prepared.get(name)) is not None:
                inputs[name] = value[..., [row if value.shape[-2] > 1 else 0], -size:]
        shift = 0
        if (positions := inputs.get("position_ids")) is not None:
            if bool(places[row, -1]) and positions.dim() == 3:
                message = "a prompt that ends with an image cannot be continued: let a text follow the image"
                raise UnsupportedError(message)
            shift = int(positions.flatten(0, -2)[-1, -1]) + 1 - size  # the axes of an image are equal for text
        rows.append(ImagePrompt(size, inputs, shift))
        first += count
    return rows


def _form(encoded: ModelOutput) -> str:
    """Return the name under which a model returns its encoded images."""
    for name in ("pooler_output", "last_hidden_state"):
        if encoded.get(name) is not None:
            return name
    raise UnsupportedError(_UNKNOWN_FORM)


def _flat(features: Any) -> Tensor:
    """Return encoded images, a tensor `[..., D]` of several or a list with one of each, as `[tokens, D]`."""
    return torch.cat([feature.reshape(-1, feature.shape[-1]) for feature in features])


def _slice(encoded: ModelOutput, tokens: slice) -> ModelOutput:
    """Return some tokens of encoded images, in the model's own format for one image."""

    def take(features: object) -> object:
        taken = _flat(features)[tokens]
        return taken[None] if isinstance(features, Tensor) else [taken]

    sliced = {_form(encoded): take(encoded[_form(encoded)])}
    if (layers := encoded.get("deepstack_features")) is not None:
        if not isinstance(layers[0][0], Tensor):
            raise UnsupportedError(_UNKNOWN_FORM)
        sliced["deepstack_features"] = [take(layer) for layer in layers]
    return type(encoded)(**sliced)


def to_model(value: object, device: torch.device) -> object:
    """Return tensors, alone or in lists, on a device, and anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    return [to_model(each, device) for each in value] if isinstance(value, list | tuple) else value


class ImageReader:
    """Reads a prompt with images in one forward of the model's own, where the model supports it."""

    def __init__(self, target: BoundModel, caches: CacheSupport, read_whole: Callable[..., tuple[Tensor, Tensor]]):
        """Make the reader of a target. read_whole: `PaddedForward.read_whole`."""
        self._target, self._caches, self._read_whole = target, caches, read_whole

    @property
    def support(self) -> Support:
        """Return whether prompts may have images, on the kind of cache that the model is decoded on."""
        return self.support_on(paged=self._target.varlen.ok)

    def check(self) -> None:
        """Raise `UnsupportedError` where prompts may have no images."""
        self._target.features.check(IMAGES)
        if reason := self.support.reason:
            raise UnsupportedError(f"{self._target.name} takes no images here: {reason}")

    def support_on(self, *, paged: bool) -> Support:
        """Return whether prompts may have images on a paged cache, or on a dense one."""
        reason, stored = None, [replace(shape, source=None) for shape in self._caches.paged_shapes]
        if not self._target.image_arguments:
            reason = "its forward does not accept encoded images (mm_encoder_outputs)"
        elif conflict := self._target.features.conflict(IMAGES):
            return Support(conflict)
        elif paged and stored != self._caches.shapes:
            reason = "it stores other tensors on a paged cache than on its own"
        return Support(reason and f"{reason}; pass text alone (without --image)")

    def read_prompt(
        self, ids: Tensor, prompt: ImagePrompt, cache: KVCache, adapters: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Read one prompt with images into a cache, as the model itself does.

        Args:
            ids: The prompt, and the tokens generated before the row was preempted, `[1, P]` int64.
            prompt: The model's inputs in addition to the ids of the prompt.
            cache: KV cache of one row, which stores all P tokens.
            adapters: Slot of the row's adapter, `[1]` int64; None for the model alone.

        Returns:
            Logits `[1, V]` and hidden states `[1, F]` of the last token.
        """
        past = DynamicCache() if cache.fp8 is None else RoundingCache(cache.fp8)
        length = prompt.length + prompt.position_shift
        logits, hidden = self._read_whole(ids[:, : prompt.length], prompt.inputs, past, adapters, prompt=length)
        if prompt.length < ids.shape[1]:
            positions = torch.arange(prompt.length, ids.shape[1], device=ids.device) + prompt.position_shift
            text = ids[:, prompt.length :], {"position_ids": positions[None]}
            logits, later = self._read_whole(*text, past, adapters)
            hidden = torch.cat([hidden, later], dim=1)
        # Copied from transformers' cache, since the model's own forward writes only to such a cache.
        layers: Sequence[Any] = past.layers
        shapes, drafter_layer = self._caches.shapes, self._target.drafter_layer
        cache.fill_first_slots((i, (layers[i].keys, layers[i].values)) for i, shape in enumerate(shapes) if shape.heads)
        if drafter_layer is not None:
            places = torch.arange(ids.shape[1], device=ids.device)
            slots = cache.slots(places[None])
            earlier = (places - 1).clamp(min=0)
            drafter_layer.write(cache, slots, lambda: slots[earlier], ids[0], places, hidden[0])
        return logits, hidden[:, -1]
