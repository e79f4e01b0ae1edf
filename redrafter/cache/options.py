"""Options of caches of keys and values: memory, storage format, stored prefixes and memory of the host."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from redrafter.options import check_values, option, share, whole

if TYPE_CHECKING:
    import torch

# Storage formats by name, with torch's names; None for the activations' dtype.
KV_CACHE_DTYPES = {"auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def _within_host_memory(value: object) -> str | None:
    import psutil

    total = psutil.virtual_memory().total / 2**30
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= total
    return None if fits else f"from 0 to the machine's memory, {int(total)} GiB"


@dataclass(frozen=True)
class CacheOptions:
    """Configures the KV cache: its memory, its storage format and the prefixes that it stores.

    Attributes:
        kv_cache_free_gpu_memory_fraction: share of the GPU memory left by the model, at the first request, that the KV
            cache may use; at most as much as 64 rows of the longest sequence need
        kv_host_cache_gib: GiB of host memory for keys and values evicted from the GPU, where later prompts still find
            them; allocated at the first request, or when a server starts
        max_prefix_states: maximum number of cached prefixes with recurrent states, for a model with such layers (LFM2,
            Mamba-2, Qwen3-Next and others), at which prompts continue; each takes as much memory as a sequence's
            states, all together a quarter of the cache's at most; 0: every prompt is read from its first token on
        kv_cache_dtype: format of stored keys and values: auto is the activations', fp8 (fp8_e4m3) holds twice as many
            tokens
    """

    kv_cache_free_gpu_memory_fraction: float = option(0.9, check=share)
    kv_host_cache_gib: float = option(0.0, check=_within_host_memory, commands=("serve",))
    max_prefix_states: int = option(64, check=whole(0))
    kv_cache_dtype: str = option("auto", choices=tuple(KV_CACHE_DTYPES))

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for keys and values."""
        return int(self.kv_host_cache_gib * 2**30)

    @property
    def kv_dtype(self) -> "torch.dtype | None":
        """Storage format of keys and values; None for the activations' dtype."""
        import torch

        name = KV_CACHE_DTYPES[self.kv_cache_dtype]
        return None if name is None else getattr(torch, name)
