"""Options of `redrafter serve`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from redrafter.app.flags import flag, names
from redrafter.chat import thoughts
from redrafter.errors import ArgumentError
from redrafter.options import between, check_values, option
from redrafter.scheduler.waiting_queue import Limits
from redrafter.serve.answers.call_forms import PARSERS

_KEY_NAME = re.compile(r"key-[1-9]\d*")


@dataclass(frozen=True)
class ServeOptions:
    """Serve a model over HTTP. Without MODEL, the pair in the box.

    Paths: /v1/chat/completions, /v1/completions, those of extensions, /v1/models, /tokenize, /health, /metrics, /docs.

    Examples:
        redrafter serve my-merged --port 8000
        redrafter serve my-base --drafter my-drafter --max-batch-size 64 --api-key-file keys.txt
        redrafter serve my-70b --draft-model my-1b
        redrafter serve my-base --drafter my-drafter --lora-modules poems=my-lora law=my-other-lora

    Attributes:
        host: address to listen on; 0.0.0.0 for all
        port: port to listen on; 0 for any that is free
        served_model_name: name of the model for clients (default: its own name)
        api_key: key that clients must send as a bearer token (may be repeated); other users can read a command line, so
            prefer the environment variable REDRAFTER_API_KEY or a file
        api_key_file: file with such keys, one a line
        operator_key: key that an operator must send as a bearer token to change the running engine: POST /v1/sleep,
            /v1/wake, /v1/update_weights, /v1/drafter (may be repeated); prefer the environment variable
            REDRAFTER_OPERATOR_KEY
        open_metrics: allow reading /metrics without a key
        allowed_hosts: accepted names in the Host header, such as a.example.org,*.example.net; * for all (default: on a
            loopback address, its own names; else all)
        allowed_origins: origins whose pages may send requests, such as https://chat.example.org; * for all
        ssl_certfile: certificate to serve https with
        ssl_keyfile: key of the certificate, if it is in another file
        ssl_ca_certs: certificate authorities of client certificates, which clients then need
        max_connections: maximum number of connections (default: 1024, or fewer if the limit of open files is lower)
        max_body_size: maximum bytes of a request body, including images
        max_images: maximum images per request, for vision-language models; 0 refuses images
        max_image_size: maximum bytes of an image (PNG, JPEG, WebP or GIF)
        max_image_pixels: maximum pixels of all images of a request
        drain_timeout: seconds that running requests may take to finish after a signal to stop
        max_batch_size: maximum number of sequences in a batch
        max_num_tokens: maximum tokens of a forward, drafts and prompt chunks together
        max_queue_size: maximum number of waiting requests; 0 for no limit
        scheduling_policy: priority: requests with a lower "priority" (default 0) are served first and may preempt
            others; fcfs: first come, first served; no request may set a priority
        guaranteed_no_evict: admit a sequence only if the cache has room for its maximum length
        chunked_context: prefill long prompts in chunks, between which other sequences continue
        kv_cache_reuse: reuse cached prefixes of prompts
        speculate: draft tokens for the model to verify
        warm_up: compile kernels and capture steps on a GPU before requests need them
        special_tokens_in_content: encode special tokens that a message spells, such as <|im_end|>, as such, rather than
            as text
        reasoning_format: auto: return the text between the marks of thoughts as reasoning_content; none: as part of the
            answer's content
        reasoning_parser: marks around the model's thoughts, by the name of their parser in vLLM (default: the marks in
            the chat template or the tokenizer)
        tool_call_parser: format of the model's tool calls, by its name in vLLM (default: the format in the chat
            template, else JSON)
        lora_modules: LoRA adapters to serve as further models: name=path; the path is a directory that PEFT wrote
        allow_runtime_lora_updating: let clients load and unload adapters from directories of this machine: POST
            /v1/load_lora_adapter and /v1/unload_lora_adapter
        otlp_traces_endpoint: OpenTelemetry collector that gets a span of each request over HTTP, such as
            http://localhost:4318: pip install '.[serve,otel]' in a checkout of redrafter
        capture: write prompts and answers to this directory, as rows of token ids for redrafter train, readable by the
            owner only
        capture_max_bytes: maximum bytes of captured files; the oldest are deleted first
        capture_except: keys whose requests are not captured, by number in the order of the keys, such as key-2,key-5
        log_format: format of the log on stderr
        log_level: lowest level that is logged
    """

    host: str = "127.0.0.1"
    port: int = option(8000, check=between(0, 65535))
    served_model_name: str | None = option(None, metavar="NAME")
    api_key: tuple[str, ...] = option((), action="append", type=str, metavar="KEY")
    api_key_file: str | None = option(None, names="file")
    operator_key: tuple[str, ...] = option((), action="append", type=str, metavar="KEY")
    open_metrics: bool = False
    allowed_hosts: tuple[str, ...] = option((), type=names, metavar="NAMES")
    allowed_origins: tuple[str, ...] = option((), type=names, metavar="ORIGINS")
    ssl_certfile: str | None = option(None, names="file")
    ssl_keyfile: str | None = option(None, names="file")
    ssl_ca_certs: str | None = option(None, names="file")
    max_connections: int | None = option(None, check=between(1, 1 << 20))
    max_body_size: int = option(2 << 20, check=between(1 << 10, 1 << 30))
    max_images: int = option(8, check=between(0, 1024))
    max_image_size: int = option(8 << 20, check=between(1 << 10, 1 << 30))
    max_image_pixels: int = option(1 << 24, check=between(1 << 10, 1 << 30))
    drain_timeout: float = option(30.0, check=between(0, 86400))
    max_batch_size: int = option(Limits.max_batch_size, check=between(1, 4096))
    max_num_tokens: int = option(Limits.max_num_tokens, check=between(16, 1 << 20))
    max_queue_size: int = option(Limits.max_queue_size, check=between(0, 1 << 30))
    scheduling_policy: str = option("fcfs", choices=("fcfs", "priority"))
    guaranteed_no_evict: bool = False
    chunked_context: bool = True
    kv_cache_reuse: bool = True
    speculate: bool = True
    warm_up: bool = True
    special_tokens_in_content: bool = False
    reasoning_format: str = option("auto", choices=("auto", "none"))
    reasoning_parser: str = option("auto", choices=("auto", *thoughts.PARSERS))
    tool_call_parser: str = option("auto", choices=("auto", *PARSERS))
    lora_modules: tuple[str, ...] = option((), metavar="NAME=PATH")
    allow_runtime_lora_updating: bool = False
    otlp_traces_endpoint: str | None = option(None, metavar="URL")
    capture: str | None = option(None, path=True, metavar="DIR")
    capture_max_bytes: int = option(1 << 30, check=between(1 << 16, 1 << 50))
    capture_except: tuple[str, ...] = option((), type=names, metavar="KEYS")
    log_format: str = option("text", choices=("text", "json"))
    log_level: str = option("info", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check_values(self, flag)
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/\s]", endpoint):
            raise ArgumentError(f"--otlp-traces-endpoint must be a URL such as http://localhost:4318, got {endpoint!r}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ArgumentError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if self.capture is None and self.capture_except:
            raise ArgumentError("--capture-except needs --capture DIR: add that, or leave it out")
        if bad := [name for name in self.capture_except if not _KEY_NAME.fullmatch(name)]:
            raise ArgumentError(f"--capture-except names keys by their numbers, such as key-2, got {bad[0]!r}")
        parse_lora_modules(self.lora_modules)

    def limits(self, max_seq_len: int | None, max_input_len: int | None = None) -> Limits:
        """Return the limits of the scheduler, given the most tokens of a sequence and of a prompt, as in `Limits`."""
        sizes = self.max_batch_size, self.max_num_tokens, max_seq_len, max_input_len, self.max_queue_size
        return Limits(*sizes, self.guaranteed_no_evict, chunked=self.chunked_context, reuse=self.kv_cache_reuse)


def parse_lora_modules(words: Sequence[str]) -> dict[str, str]:
    """Parse the words `name=path` of `--lora-modules` into a mapping; raises `ArgumentError` for another form."""
    modules: dict[str, str] = {}
    for word in words:
        name, _, path = word.partition("=")
        if not name or not path:
            raise ArgumentError(f"--lora-modules are name=path, got {word!r}")
        if name in modules:
            raise ArgumentError(f"--lora-modules names {name!r} twice: give each adapter another name")
        modules[name] = path
    return modules
