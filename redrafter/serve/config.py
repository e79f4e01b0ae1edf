"""The options of `redrafter serve`, and the keys of TensorRT-LLM's server that they stand for."""

from dataclasses import dataclass

from redrafter.errors import ArgumentError
from redrafter.flags import flag, option
from redrafter.serve.scheduler import Limits

__all__ = ["ServeOptions"]


@dataclass(frozen=True)
class ServeOptions:
    """How a server listens, and what it may take on."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "port to listen on; 0 for any that is free")
    served_model_name: str | None = option(None, "what clients call the model (default: its own name)", metavar="NAME")
    api_key: str | None = option(None, "what clients must send as a bearer token", metavar="KEY")
    max_batch_size: int = option(Limits.max_batch_size, "texts that are written at once")
    max_num_tokens: int = option(Limits.max_num_tokens, "tokens of one forward: drafts, and pieces of prompts")
    max_queue_size: int = option(Limits.max_queue_size, "requests that may wait; 0: any number")
    guaranteed_no_evict: bool = option(False, "take a request on only where its longest text has room in the cache")
    chunked_context: bool = option(True, "read a prompt whole, however long texts that are being written wait for it")
    kv_cache_reuse: bool = option(True, "read every prompt from its beginning")
    speculate: bool = option(True, "plain decoding")

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65535),
            ("max_batch_size", 1, 4096),
            ("max_num_tokens", 16, 1 << 20),
            ("max_queue_size", 0, 1 << 30),
        ):
            if not least <= getattr(self, name) <= most:
                raise ArgumentError(f"{flag(name)} must be from {least} to {most}, got {getattr(self, name)}")
        for name in ("host", "served_model_name", "api_key"):
            if getattr(self, name) == "":
                raise ArgumentError(f"{flag(name)} needs a value, got an empty one")

    def limits(self, max_seq_len: int | None) -> Limits:
        return Limits(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=max_seq_len,
            max_queue_size=self.max_queue_size,
            guaranteed_no_evict=self.guaranteed_no_evict,
            chunked=self.chunked_context,
            reuse=self.kv_cache_reuse,
        )
