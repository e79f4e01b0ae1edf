"""The assistants released with Gemma 4: small models that attend to the keys and values of their target.

An assistant stores nothing. Each of its layers attends to the committed tokens' keys and values in the target's last
layer of the same kind, and to no drafts. It reads the embedding of a token and a hidden state, the target's or its own
of the draft before, always at the position of the pending token.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from redrafter.attention.mask import additive_mask
from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.decoder_parts import of_beams
from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.drafting.drafter_model import DrafterModel, refuse_differences
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.errors import MismatchError, UnsupportedError
from redrafter.features import ASSISTANT
from redrafter.files.atomic_file import share_weights
from redrafter.files.checkpoint_kind import load_error
from redrafter.files.stored_tensors import read_directory
from redrafter.kernels.cache_format import read_slots
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand

LEFT_OUT = 100.0  # distance of the scores of ids in other clusters below the lowest score of the chosen ones


class AssistantConfig(AnyDrafterConfig):
    """Facts about an assistant in addition to transformers' config of it, in the same file, with `AnyDrafterConfig`'s.

    Attributes:
        text_config: The config of its decoder.
        backbone_hidden_size: D, hidden size of the target.
        layers: Layers of its decoder.
    """

    model_type = "gemma4_assistant"

    text_config: dict[str, Any] = field(default_factory=dict)
    backbone_hidden_size: int = 0
    layers: int = 0
    draft_beams: int = 3
    draft_len_per_beam: int = 4

    def __post_init__(self, **kwargs: object) -> None:
        self.hidden_size, self.vocab_size = self.backbone_hidden_size, self.text_config.get("vocab_size", 0)
        self.layers = self.text_config.get("num_hidden_layers", 0)
        super().__post_init__(**kwargs)


@contextmanager
def all_layers_shared() -> Iterator[None]:
    """Let transformers make models whose layers all attend to another model's keys, as assistants' layers do.

    Version 5.23 looks for the source layers in the same model, and refuses its own assistants.
    """
    config: Any = CONFIG_MAPPING["gemma4_text"]
    modes = vars(config).get("kv_sharing_modes")
    if not isinstance(modes, property):
        yield
        return

    known: Any = modes.fget

    def shared(self: Any) -> object:
        count = self.num_hidden_layers
        return ["reuse"] * count if self.num_kv_shared_layers == count else known(self)

    config.kv_sharing_modes = property(shared)
    try:
        yield
    finally:
        config.kv_sharing_modes = modes


@dataclass(frozen=True)
class Shared:
    """Keys and values `[B, H, S, d]` for one kind of layers, and whether a row has them, `[B, S]` bool."""

    keys: Tensor
    values: Tensor
    seen: Tensor


@register_drafter()
class AssistantDrafter(DrafterModel):
    """An assistant, which transformers computes."""

    config_class = AssistantConfig
    config: AssistantConfig
    made_from_config = False

    def __init__(self, config: AssistantConfig, assistant: Any):
        """Wrap transformers' model of an assistant."""
        super().__init__(config)
        self.assistant = assistant

    @property
    def unquantized(self) -> nn.Module | None:  # type: ignore[override]
        """The head, where single rows of it are read."""
        return None if self.assistant.masked_embedding is None else self.assistant.lm_head

    @classmethod
    def from_pretrained(cls, name: Any, *args: object, **kwargs: Any) -> object:  # type: ignore[override]
        """Load an assistant as transformers does, and refuse a checkpoint that does not hold exactly its tensors.

        Raises:
            CheckpointError: Files are missing or truncated, or hold other tensors.
            UnsupportedError: This version of transformers has no such models.
        """
        config, _ = PretrainedConfig.get_config_dict(str(name), **kwargs)
        if config["model_type"] not in CONFIG_MAPPING:
            message = f"{name} is a {config['model_type']}, which this version of transformers does not have: update it"
            raise UnsupportedError(message)
        source, loader = Path(name) / kwargs.get("subfolder", ""), cast("Any", AutoModelForCausalLM)
        read = read_directory(source) if source.is_dir() else None
        try:
            with all_layers_shared():
                if read is not None:  # transformers would map its files, and so depend on them
                    form = AutoConfig.from_pretrained(source)
                    loader, name, kwargs = MODEL_FOR_CAUSAL_LM_MAPPING[type(form)], None, {"config": form}
                assistant, info = loader.from_pretrained(
                    name, *args, dtype="auto", output_loading_info=True, state_dict=read, **kwargs
                )
        except Exception as error:
            raise load_error("drafter", source, error) from error
        refuse_differences(info, source)
        return cls(AssistantConfig.from_dict(config), assistant.eval().requires_grad_(False))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: object, **kwargs: object) -> None:
        """Save the assistant as transformers does, in files of the umask's mode."""
        self.assistant.save_pretrained(save_directory, *args, **kwargs)
        share_weights(Path(save_directory))

    def check_search(self, target: Target, depth: int) -> None:
        """Raise as `layers_shared` does."""
        self.layers_shared(target)

    def layers_shared(self, target: Target) -> dict[str, int]:
        """Return the index of the target's layer that each kind of layers attends to, by kind.

        Raises:
            MismatchError: The target has no layer of the kind, or one of other sizes.
            UnsupportedError: The target is split over processes.
        """
        target.features.check(ASSISTANT)
        kinds = list(getattr(target.config, "layer_types", None) or ())
        # The last layers may share the keys and values of earlier ones, and store none.
        kinds = kinds[: len(kinds) - (getattr(target.config, "num_kv_shared_layers", None) or 0)]
        last, shared = {kind: index for index, kind in enumerate(kinds)}, dict[str, int]()
        for layer in self.assistant.model.layers:
            attention = layer.self_attn
            kind = attention.layer_type
            if kind not in last:
                raise MismatchError(f"the assistant attends to a layer of the kind {kind}, and {target.name} has none")
            shape, shared[kind] = target.shapes[last[kind]], last[kind]
            heads = self.assistant.model.config.num_attention_heads // attention.num_key_value_groups
            if (shape.heads, shape.key_dim) != (heads, attention.head_dim):
                raise MismatchError(
                    f"the assistant attends to {heads} x {attention.head_dim} numbers of a token in layers of the kind "
                    f"{kind}, and {target.name} stores {shape.heads} x {shape.key_dim}: it was made for another base"
                )
        return shared

    def step(
        self, embedding: Tensor, hidden: Tensor, position: Tensor, shared: Mapping[str, Shared]
    ) -> tuple[Tensor, Tensor]:
        """Compute one draft step of w beams.

        Args:
            embedding: The target's embeddings of the tokens that were drafted last, `[B, w, D]`.
            hidden: The hidden states that these were drafted from, `[B, w, D]`.
            position: Position of each row's pending token, `[B]` int64.
            shared: Entries that each kind of layers attends to.

        Returns:
            Logits `[B, w, V]`, and the hidden states that the next step reads, `[B, w, D]`.
        """
        inputs = self.assistant.pre_projection(torch.cat([embedding, hidden], dim=-1))
        # The mask hides positions before the start of a short row, whose slots repeat slot 0.
        masks = {
            kind: additive_mask(read.seen[:, None], inputs.dtype).expand(-1, -1, inputs.shape[1], -1)
            for kind, read in shared.items()
        }
        out = self.assistant.model(
            inputs_embeds=inputs,
            attention_mask=masks,
            position_ids=position[:, None].expand(-1, inputs.shape[1]),
            shared_kv_states={kind: (read.keys, read.values) for kind, read in shared.items()},
            use_cache=False,
            logits_to_keep=None,  # for a number, transformers would drop all tokens but the last ones
        ).last_hidden_state
        return self.logits(out), self.assistant.post_projection(out)

    forward = step

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[B, w, V]`: of all ids, or only of ids in the likeliest clusters."""
        clusters, head = self.assistant.masked_embedding, self.assistant.lm_head
        if clusters is None:
            return cast("Tensor", head(hidden))
        # transformers' own forward reads a number on the host, which a captured step must not do.
        chosen = clusters.centroids(hidden).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
        ids = clusters.token_ordering.long().view(clusters.num_centroids, -1)[chosen].flatten(-2)  # [B, w, n]
        found = (head.weight[ids] @ hidden[..., None])[..., 0]
        # Below all chosen ids but finite, so that sums of scores stay comparable.
        others = (found.amin(-1, keepdim=True) - LEFT_OUT).expand(-1, -1, self.config.vocab_size)
        return others.scatter(-1, ids, found)


@dataclass(frozen=True)
class AssistantProposer(SearchProposer[dict[str, Shared]]):
    """Drafts with an assistant; the attributes are those of `SearchProposer`."""

    drafter: AssistantDrafter

    @cached_property
    def layers_shared(self) -> dict[str, int]:
        """The number of the target's layer that each kind of layers attends to."""
        return self.drafter.layers_shared(self.target)

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: dict[str, Shared]) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        carried = state.hidden[:, None]

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried
            carried = of_beams(carried, sources) if k else carried
            embedding = self.target.embedding(tokens)
            logits, carried = self.drafter.step(embedding, carried, state.length, context)
            return sampler.draft_scores(logits, noise, k, None)

        return expand

    def read_context(self, state: State, cache: KVCache) -> dict[str, Shared]:
        """Return the target's entries of committed tokens that each kind of layers attends to."""
        shared, window, length = {}, self.drafter.assistant.model.config.sliding_window, state.length
        for kind, layer in self.layers_shared.items():
            # One more than the window, as the pending token is counted in it but not cached.
            size = min(window + 1, cache.window) if kind == "sliding_attention" else cache.window
            position = (length - size)[:, None] + torch.arange(size, device=length.device)  # [B, S]
            slots = cache.slots(position.clamp(min=0))
            keys, values = (
                read_slots(store, slots, self.target.dtype).unflatten(0, position.shape).transpose(1, 2)
                for store in cache.stores(layer)[:2]
            )
            shared[kind] = Shared(keys, values, position >= 0)
        return shared


AssistantDrafter.proposer_class = AssistantProposer
