"""Options of `redrafter serve`, and configuration files for them, including those of TensorRT-LLM's server."""

import json
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redrafter.app.config_file import check_object, convert_value, options_by_name, read_object
from redrafter.app.flags import flag, names
from redrafter.errors import ArgumentError, how_to_install
from redrafter.files.checkpoint_kind import check_source
from redrafter.files.hub import find_model_file
from redrafter.options import option
from redrafter.scheduler.waiting_queue import Limits
from redrafter.serve.answers import thoughts
from redrafter.serve.answers.call_forms import PARSERS
from redrafter.serve.network.api_keys import KEY_VARIABLE, OPERATOR_KEY_VARIABLE

# Keys of `runtime.json` and of the `runtime` part of `llgtrt.json5`, and the equivalent options here.
_RUNTIME = {
    "enable_chunked_context": "chunked_context",
    "enable_kv_cache_reuse": "kv_cache_reuse",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_free_gpu_memory_fraction",
    "kv_cache_host_memory_megabytes": "kv_host_cache_gib",
}
_UNITS = {"kv_cache_host_memory_megabytes": 1 / 1024}  # factors from their units to the units of our options
_NO_MEANING = frozenset(
    {
        "cross_kv_cache_fraction",
        "enable_batch_size_tuning",
        "enable_max_num_tokens_tuning",
        "event_buffer_max_size",
        "kv_cache_onboard_blocks",
        "secondary_offload_min_priority",
    }
)
# Parts of `llgtrt.json5` other than `runtime`, with the reason they are ignored or the replacement to use.
_PARTS = {
    "llguidance": "the limits of grammars are this server's own",
    "py": "no Python scripts are run beside the server",
    "tokenizer": "the tokenizer is the one beside the model; its chat template is --chat-template FILE",
}
_KEY_NAME = re.compile(r"key-[1-9]\d*")
CONFIG_FILES = ("runtime.json", "llgtrt.json5")  # read from the model's directory; the second takes precedence
# Options that these files may set: a model's author may choose batching limits, but not who may access the server.
LIMIT_OPTIONS = frozenset(
    {
        "chunked_context",
        "guaranteed_no_evict",
        "kv_cache_free_gpu_memory_fraction",
        "kv_cache_reuse",
        "kv_host_cache_gib",
        "max_batch_size",
        "max_num_tokens",
        "max_queue_size",
    }
)


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server: where it listens, who may use it, and how many requests it serves at once."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "port to listen on; 0 for any that is free")
    served_model_name: str | None = option(None, "what clients call the model (default: its own name)", metavar="NAME")
    api_key: tuple[str, ...] = option(
        (),
        f"what clients must send as a bearer token (may be repeated); a command line is there for all to read: "
        f"better in the environment as {KEY_VARIABLE}, or in a file",
        action="append",
        type=str,
        metavar="KEY",
    )
    api_key_file: str | None = option(None, "such keys, a line each", path=True, metavar="FILE", names="file")
    operator_key: tuple[str, ...] = option(
        (),
        "what an operator must send as a bearer token to change the engine while it runs: POST /v1/sleep, /v1/wake, "
        f"/v1/update_weights, /v1/drafter (may be repeated); better in the environment as {OPERATOR_KEY_VARIABLE}",
        action="append",
        type=str,
        metavar="KEY",
    )
    open_metrics: bool = option(False, "let /metrics be read without a key")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names in the Host header that are answered, such as a.example.org,*.example.net; * for all (default: on a "
        "loopback address, its own names; else all)",
        type=names,
        metavar="NAMES",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "pages of other servers that may ask, such as https://chat.example.org; * for all",
        type=names,
        metavar="ORIGINS",
    )
    ssl_certfile: str | None = option(None, "certificate to serve https with", path=True, metavar="FILE", names="file")
    ssl_keyfile: str | None = option(
        None, "its key, where it is not in the same file", path=True, metavar="FILE", names="file"
    )
    ssl_ca_certs: str | None = option(
        None,
        "certificates of those who may sign clients' own, which clients then need",
        path=True,
        metavar="FILE",
        names="file",
    )
    max_connections: int | None = option(
        None, "connections at once (default: 1024, or as many as files may be open)", metavar="N"
    )
    max_body_size: int = option(2 << 20, "bytes of a request's body, images included")
    max_images: int = option(8, "images of a request, for a model that sees them; 0: none are taken")
    max_image_size: int = option(8 << 20, "bytes of an image, as PNG, JPEG, WebP or GIF")
    max_image_pixels: int = option(1 << 24, "pixels of a request's images together")
    drain_timeout: float = option(30.0, "seconds that texts have to end in once the server is told to stop")
    max_batch_size: int = option(Limits.max_batch_size, "texts that are written at once")
    max_num_tokens: int = option(Limits.max_num_tokens, "tokens of one forward: drafts, and pieces of prompts")
    max_queue_size: int = option(Limits.max_queue_size, "requests that may wait; 0: any number")
    scheduling_policy: str = option(
        "fcfs",
        'priority: requests with a lower "priority" (default 0) are served first, and others put back for them; fcfs: '
        "no request may have one",
        choices=("fcfs", "priority"),
    )
    guaranteed_no_evict: bool = option(False, "take a request on only where its longest text has room in the cache")
    chunked_context: bool = option(True, "read long prompts in pieces, between which other texts continue")
    kv_cache_reuse: bool = option(True, "reuse cached beginnings of prompts")
    speculate: bool = option(True, "draft tokens for the model to verify")
    draft_from_answers: str = option(
        "auto",
        "draft what texts that have ended said too, of the same key and cache_salt; auto: on, or off with several keys",
        choices=("auto", "on", "off"),
    )
    warm_up: bool = option(True, "compile kernels and capture steps on a GPU before the first request")
    chat_template: str | None = option(
        None, "chat template in Jinja (default: the model's own)", metavar="FILE", path=True, names="file"
    )
    special_tokens_in_content: bool = option(
        False, "where a message spells a special token, such as <|im_end|>, let it be one; else it stays text"
    )
    reasoning_format: str = option(
        "auto",
        "auto: what a model writes between the marks of its thoughts is its answer's reasoning_content; none: it is "
        "part of the answer's text",
        choices=("auto", "none"),
    )
    reasoning_parser: str = option(
        "auto",
        "marks that the model writes around its thoughts, by vLLM's name of their parser (default: those that the chat "
        "template or the tokenizer has)",
        choices=("auto", *thoughts.PARSERS),
    )
    tool_call_parser: str = option(
        "auto",
        "form in which the model writes calls of tools, by vLLM's name of it (default: the one that the chat template "
        "shows, else JSON)",
        choices=("auto", *PARSERS),
    )
    lora_modules: tuple[str, ...] = option(
        (),
        'LoRA adapters to serve beside the model, each as a model of its own: name=path, or {"name": "...", "path": '
        '"..."}; the path is a directory that PEFT wrote',
        metavar="NAME=PATH",
    )
    allow_runtime_lora_updating: bool = option(
        False,
        "let clients load and unload adapters from directories of this machine: POST /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OpenTelemetry collector that gets a span of each request over HTTP, such as http://localhost:4318: "
        f"{how_to_install('serve,otel')}",
        metavar="URL",
    )
    capture: str | None = option(
        None,
        "write what is asked and answered to this directory, as rows of token ids that redrafter train takes; their "
        "owner alone can read them",
        path=True,
        metavar="DIR",
    )
    capture_max_bytes: int = option(1 << 30, "bytes of such files at most; the oldest are dropped first")
    capture_except: tuple[str, ...] = option(
        (),
        "keys whose texts are not captured, by their numbers in the order of the keys, such as key-2,key-5",
        type=names,
        metavar="KEYS",
    )
    log_format: str = option("text", "what lines on stderr are, of requests and all else", choices=("text", "json"))
    log_level: str = option("info", "the least that is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65535),
            ("max_batch_size", 1, 4096),
            ("max_num_tokens", 16, 1 << 20),
            ("max_queue_size", 0, 1 << 30),
            ("max_connections", 1, 1 << 20),
            ("max_body_size", 1 << 10, 1 << 30),
            ("capture_max_bytes", 1 << 16, 1 << 50),
            ("max_images", 0, 1024),
            ("max_image_size", 1 << 10, 1 << 30),
            ("max_image_pixels", 1 << 10, 1 << 30),
            ("drain_timeout", 0, 86400),
        ):
            if getattr(self, name) is not None and not least <= getattr(self, name) <= most:
                raise ArgumentError(f"{flag(name)} must be from {least} to {most}, got {getattr(self, name)}")
        for name in (
            "host",
            "served_model_name",
            "api_key",
            "operator_key",
            "allowed_hosts",
            "allowed_origins",
            "chat_template",
            "capture",
        ):
            value = getattr(self, name)
            if value == "" or (isinstance(value, tuple) and "" in value):
                raise ArgumentError(f"{flag(name)} needs a value, got an empty one")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/\s]", endpoint):
            raise ArgumentError(f"--otlp-traces-endpoint must be a URL such as http://localhost:4318, got {endpoint!r}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ArgumentError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if self.capture is None and self.capture_except:
            raise ArgumentError(
                "--capture-except leaves keys out of what --capture DIR writes: add that, or leave it out"
            )
        if bad := [name for name in self.capture_except if not _KEY_NAME.fullmatch(name)]:
            raise ArgumentError(f"--capture-except names keys by their numbers, such as key-2, got {bad[0]!r}")
        parse_lora_modules(self.lora_modules)

    def with_keys(self, count: int) -> "ServeOptions":
        """Resolve `draft_from_answers` for `count` API keys: several clients do not share answers by default."""
        if self.draft_from_answers != "auto":
            return self
        return replace(self, draft_from_answers="on" if count <= 1 else "off")

    def limits(self, max_seq_len: int | None) -> Limits:
        """Return the limits of the scheduler. max_seq_len: most tokens of a sequence; None for the model's context."""
        return Limits(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=max_seq_len,
            max_queue_size=self.max_queue_size,
            guaranteed_no_evict=self.guaranteed_no_evict,
            chunked=self.chunked_context,
            reuse=self.kv_cache_reuse,
        )


def config_beside(model: str) -> list[str]:
    """Return the paths of the `CONFIG_FILES` that exist in a model's directory or repository.

    Raises the errors of `check_source`.
    """
    check_source(model)
    return [file for name in CONFIG_FILES if (file := find_model_file(model, name)) is not None]


def read_config(files: Sequence[str], options: Sequence[type], only: Collection[str] | None = None) -> dict[str, Any]:
    """Read options of dataclasses by name from JSON or JSON5 files, where later files take precedence.

    Keys are the flags' names, with dashes or underscores, or those of `runtime.json`, at the top or under `runtime`.
    A warning is logged for each key that has no equivalent here, or that is not in `only` if it is given.

    Raises:
        ArgumentError: A file cannot be read, or a key is unknown or has a wrong value.
    """
    known = options_by_name(options)
    values: dict[str, Any] = {}
    for file in files:
        for key, value in _entries(file):
            spelt = key.replace("-", "_")
            name = _RUNTIME.get(spelt, spelt)
            if spelt == "kv_cache_onboard_blocks" and value is True:
                continue  # blocks found on the host are always copied to the GPU
            if spelt in _NO_MEANING or spelt in _PARTS:
                reason = f": {_PARTS[spelt]}" if spelt in _PARTS else ""
                warnings.warn(f"{file}: {key} means nothing here{reason}", stacklevel=2)
            elif name in known and only is not None and name not in only:
                warnings.warn(
                    f"{file}: {key} is not read from a file beside a model: give it as a flag or with --config",
                    stacklevel=2,
                )
            elif value is not None or name not in known:
                values[name] = convert_value(file, key, value, known, _RUNTIME)
                if spelt in _UNITS:
                    values[name] *= _UNITS[spelt]
    return values


def _entries(file: str) -> list[tuple[str, Any]]:
    content = read_object(file, json5=True)
    runtime = check_object(f"{file}: runtime", content.pop("runtime", {}))
    return [*content.items(), *runtime.items()]


def parse_lora_modules(words: Sequence[str]) -> dict[str, str]:
    """Parse `--lora-modules` into a mapping from adapter names to directories.

    Each word is `name=path` or JSON `{"name": "...", "path": "..."}`; anything else raises `ArgumentError`.
    """
    modules: dict[str, str] = {}
    for word in words:
        name, _, path = word.partition("=")
        unknown: set[str] = set()
        if word.lstrip().startswith("{"):
            try:
                module = json.loads(word)
            except ValueError:
                module = {}
            name, path = module.get("name"), module.get("path")
            unknown = set(module) - {"name", "path", "base_model_name"}
        if not (isinstance(name, str) and isinstance(path, str) and name and path) or unknown:
            raise ArgumentError(f'--lora-modules are name=path or {{"name": "...", "path": "..."}}, got {word!r}')
        if name in modules:
            raise ArgumentError(f"--lora-modules names {name!r} twice: give each adapter a name of its own")
        modules[name] = path
    return modules
