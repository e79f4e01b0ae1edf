"""Modes of an engine that change its models: batch-invariant forwards, and the storage format of keys and values."""

from collections.abc import Iterable

import torch

from redrafter.cache.options import CacheOptions
from redrafter.engine.options import EngineOptions
from redrafter.errors import UnsupportedError
from redrafter.features import BATCH_INVARIANCE, EAGER_FORWARD, HOST_CACHE, Feature, FeatureSet
from redrafter.model.supported import Support
from redrafter.model.target import Target

# Hugging Face's processors that sum over the vocabulary in an order that, on a GPU, depends on the number of rows.
_BY_ROWS = {
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "LogitNormalization": "renormalize_logits",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
}


def set_modes(target: Target, draft_model: Target | None, options: EngineOptions) -> None:
    """Apply an engine's options to its models; raise `UnsupportedError` where a model does not support one."""
    if options.kv_host_cache_gib:
        target.features.check(HOST_CACHE)
    if options.batch_invariant:
        make_batch_invariant(target, draft_model, compile=options.compile)
    use_kv_cache_dtype(target, draft_model, options)


def make_batch_invariant(target: Target, draft_model: Target | None, *, compile: bool) -> None:
    """Make the target of an engine batch-invariant, and move its draft model, if any, to the same kind of cache.

    Drafts do not change the output, so the draft model's computation is unchanged.

    Raises:
        ArgumentError: The target was compiled before.
        UnsupportedError: The target cannot be batch-invariant, as on a GPU without `compile`, or the draft model cannot
            use a paged cache.
    """
    if target.device.type == "cuda" and not compile:
        FeatureSet(target.name, EAGER_FORWARD).check(BATCH_INVARIANCE)
    target.make_batch_invariant()
    if draft_model is not None and draft_model is not target:
        _decode_paged("batch_invariant=True", "without --batch-invariant", draft_model)


def _decode_paged(mode: str, instead: str, *models: Target) -> None:
    # Also on a CPU, where steps are not captured and a dense cache is the default.
    for model in models:
        if reason := model.paged.reason:
            message = f"{mode} needs the paged cache, and {model.name} has none: {reason}; leave it out ({instead})"
            raise UnsupportedError(message)
    # Only after all checks have passed, so that a refusal changes no model.
    for model in models:
        if model.device.type == "cpu":
            model.varlen = Support()


def check_processors(target: Target, processors: Iterable[object]) -> None:
    """Refuse Hugging Face's processors whose result depends on the batch, for a batch-invariant target."""
    if target.device.type == "cpu":
        return
    for processor in processors:
        if argument := _BY_ROWS.get(type(processor).__name__):
            why = "it sums in an order that depends on the number of rows"
            target.features.check(Feature(argument, "use top_p, top_k or min_p", {BATCH_INVARIANCE: why}))


def use_kv_cache_dtype(target: Target, draft_model: Target | None, options: CacheOptions) -> None:
    """Decode the models of an engine on a paged cache, the only one that stores keys and values in FP8.

    Raises:
        UnsupportedError: A model does not support it, or the GPU does not support the format.
    """
    dtype, name = options.kv_dtype, options.kv_cache_dtype
    if dtype is None:
        return
    if target.device.type == "cuda" and dtype == torch.float8_e4m3fn:
        capability = torch.cuda.get_device_capability(target.device)
        if capability < (8, 9):  # Triton compiles only e5m2 for older GPUs
            raise UnsupportedError(
                f"kv_cache_dtype={name!r} needs a GPU of compute capability 8.9 or more, and this one has "
                f"{'.'.join(map(str, capability))}: take 'fp8_e5m2' (--kv-cache-dtype fp8_e5m2)"
            )
    _decode_paged(f"kv_cache_dtype={name!r}", "--kv-cache-dtype auto", target, draft_model or target)
