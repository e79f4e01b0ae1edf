"""Options of caches of keys and values: memory, storage format, stored prefixes and memory of the host."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from redrafter.options import check_values, option, share, whole

if TYPE_CHECKING:
    import torch

# Storage formats by name, as torch calls them; None for that of the activations.
KV_CACHE_DTYPES = {"auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def _within_host_memory(value: object) -> str | None:
    import psutil

    total = psutil.virtual_memory().total / 2**30
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= total
    return None if fits else f"from 0 to the machine's memory, {int(total)} GiB"


@dataclass(frozen=True)
class CacheOptions:
    """Configure the KV cache: its memory, its storage format and the prefixes that it keeps."""

    kv_cache_free_gpu_memory_fraction: float = option(
        0.9,
        "share of the GPU memory left by the model, at the first request, that the KV cache may take; it takes no more "
        "than 64 rows of the longest text need",
        check=share,
    )
    kv_host_cache_gib: float = option(
        0.0,
        "GiB of the host's memory for keys and values that have to leave the GPU, where prompts still find them; taken "
        "with the first request, or when a server starts",
        check=_within_host_memory,
        commands=("serve",),
    )
    max_prefix_states: int = option(
        64,
        "most stored beginnings of texts whose recurrent states are kept, of a model with such layers (LFM2, Mamba-2, "
        "Qwen3-Next and others): prompts continue there; as much memory each as a text's states, a quarter of the "
        "cache's at most; 0: every prompt is read from its first token on",
        check=whole(0),
    )
    kv_cache_dtype: str = option(
        "auto",
        "format of stored keys and values: auto is the activations', fp8 (fp8_e4m3) holds twice as many tokens",
        choices=tuple(KV_CACHE_DTYPES),
    )

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory for keys and values."""
        return int(self.kv_host_cache_gib * 2**30)

    @property
    def kv_dtype(self) -> "torch.dtype | None":
        """Format that keys and values are stored in; None for that of the activations."""
        import torch

        name = KV_CACHE_DTYPES[self.kv_cache_dtype]
        return None if name is None else getattr(torch, name)
