"""A server: the application, and the client of the engine whose texts it answers with."""

import logging
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from redrafter.app.flags import short_name
from redrafter.app.options import LoadOptions
from redrafter.app.templates import find_template, read_template
from redrafter.checkpoints.merged import boxed_pair
from redrafter.checkpoints.tokenizers import load_processor, load_tokenizer
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.client import EngineClient
from redrafter.serve.engine_process.start import EngineFacts, EngineProcess
from redrafter.serve.images import ImageLimits, ImageReader
from redrafter.serve.metrics import Metrics
from redrafter.serve.network.api_keys import KEY_VARIABLE, ApiKeys
from redrafter.serve.network.guards import AccessPolicy
from redrafter.serve.routes.app import create_app
from redrafter.serve.service import Service

_LOG = logging.getLogger(__name__)


@dataclass
class Server:
    """The application that answers requests with the texts of an engine.

    Attributes:
        name: Name of the model that clients use.
        metrics: Metrics of the engine.
        app: The ASGI application.
    """

    engine: EngineClient
    tokenizer: PreTrainedTokenizerBase
    options: ServeOptions
    keys: ApiKeys = field(default_factory=ApiKeys)
    images: ImageReader | str = Service.images

    def __post_init__(self) -> None:
        options = self.options
        self.name = options.served_model_name or short_name(self.engine.facts.model)
        if self.name in self.engine.facts.adapters:
            raise ArgumentError(f"--lora-modules has the model's own name {self.name!r}: give the adapter another one")
        self.metrics = Metrics(self.engine, self.name)
        self.engine.on_delta = self.metrics.observe
        service = Service(
            self.engine,
            self.tokenizer,
            self.name,
            self.metrics,
            special_tokens_in_content=options.special_tokens_in_content,
            images=self.images,
            reasoning=options.reasoning_format == "auto",
        )
        policy = AccessPolicy.of(self.keys, options)
        self.app = create_app(service, policy, options.max_body_size, options.allow_runtime_lora_updating)

    def drain(self) -> None:
        """Accept nothing new; what is being written goes on, and images are decoded no longer."""
        self.engine.drain()
        if isinstance(self.images, ImageReader):
            self.images.close()

    def summary(self, url: str) -> list[str]:
        """Return log lines that say what is served, with a command to try it. url: where it is served."""
        what, *more = self.engine.facts.description
        key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if self.keys else ""
        body = f'{{"model": "{self.name}", "prompt": "Once upon a time", "max_tokens": 40}}'
        return [
            f"{self.name}: {what}",
            *more,
            f"ready on {url}; try",
            f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        ]


def load_server(process: EngineProcess, options: ServeOptions, load: LoadOptions, keys: ApiKeys) -> Server:
    """Wait until an engine's process has loaded, and return a server of it, whose clients must send a key."""
    template = read_template(options.chat_template) if options.chat_template else None
    try:  # while the process loads
        model = load.model or str(boxed_pair())
        tokenizer = load_tokenizer(model, trust_remote_code=load.trust_remote_code)
        find_template(tokenizer, model)
    except ReDrafterError:
        process.wait_until_loaded()  # whose error says more
        raise
    if template is not None:
        tokenizer.chat_template = template
    facts = process.wait_until_loaded()
    images = _load_image_reader(options, load, facts)
    return Server(EngineClient(process.channel, facts, process), tokenizer, options, keys, images)


def _load_image_reader(options: ServeOptions, load: LoadOptions, facts: EngineFacts) -> ImageReader | str:
    """Return what reads the images of chats, or why none are read, which is logged if the model takes some."""
    if not facts.image_inputs:
        return Service.images
    if not options.max_images:
        return "this server takes no images"
    limits = ImageLimits(options.max_images, options.max_image_size, options.max_image_pixels)
    try:
        processor = load_processor(facts.model, trust_remote_code=load.trust_remote_code)
        return ImageReader(processor, facts.image_inputs, limits)
    except ReDrafterError as error:
        _LOG.warning("images are refused: %s", error)
        return "this server is not set up for images"
