"""Limits of memory and lengths that an engine keeps to."""

from dataclasses import dataclass

from redrafter.errors import ArgumentError

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class EngineOptions:
    """Limits that an engine keeps to in every request.

    Attributes:
        kv_cache_free_gpu_memory_fraction: Share of the GPU memory free at the first request that keys and values may
            take. No more is taken than 64 rows of the longest text need.
        max_input_len: Longest prompt in tokens; None for what the model's context allows.
        max_seq_len: Longest text in tokens, prompt included; None for what the model's context allows.
        max_batch_size: Most texts that `generate` decodes side by side; more prompts wait for their turn.
        compile: Whether to compile the model for a GPU, once, in the first request; without it steps are captured all
            the same, and slower.
        batch_invariant: Whether a text must not depend on what is computed beside it, bit for bit: on drafts, on other
            texts, on how prompts are cut. It is slower; on a GPU it needs `compile`.
        max_loras: Most LoRA adapters that may be loaded at once.
        max_lora_rank: Most of their ranks. A forward with adapters computes `max_loras * max_lora_rank` more columns in
            each layer that they change.
        kv_host_cache_gib: GiB of the host's memory for keys and values that have to leave a paged cache, where later
            prompts still find them; 0 for none. Taken with the first request, or when a server starts.
        kv_cache_dtype: Format of stored keys and values: "auto" for that of the activations, "fp8" or "fp8_e4m3", or
            "fp8_e5m2".
    """

    kv_cache_free_gpu_memory_fraction: float = 0.9
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_batch_size: int = 256
    compile: bool = True
    batch_invariant: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    kv_host_cache_gib: float = 0.0
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        fraction = self.kv_cache_free_gpu_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ArgumentError(
                "kv_cache_free_gpu_memory_fraction must be above 0 and at most 1, got "
                f"{self.kv_cache_free_gpu_memory_fraction!r}"
            )
        for name in ("max_input_len", "max_seq_len"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not 2 <= value < 1 << 31
            ):
                raise ArgumentError(f"{name} must be an integer of 2 or more, and below 2**31, got {value!r}")
        for name in ("max_batch_size", "max_loras", "max_lora_rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
                raise ArgumentError(f"{name} must be a positive integer, got {value!r}")
        for name in ("compile", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ArgumentError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}"
            )
        check_host_cache(self.kv_host_cache_gib)


def check_host_cache(gib: float) -> None:
    """Raise `ArgumentError` unless the machine has `gib` GiB of memory."""
    import psutil

    total = psutil.virtual_memory().total / 2**30
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 <= gib <= total:
        raise ArgumentError(
            f"kv_host_cache_gib (--kv-host-cache-gib) must be from 0 to the machine's memory, {int(total)} GiB, "
            f"got {gib!r}"
        )
