"""What a server and a loaded engine say to each other. Texts have numbers, which the server gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter.grammar.source import GrammarSource
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.logprobs import PromptScore
from redrafter.scheduler.sequence import SequenceDelta

__all__ = [
    "AdaptersChanged",
    "Cancel",
    "ChangeAdapters",
    "EngineFailed",
    "EngineLoad",
    "PromptFacts",
    "Refused",
    "Submit",
    "Written",
]


@dataclass(frozen=True)
class Submit:
    """A request for texts.

    Attributes:
        numbers: Number of each text.
        prompts: Token ids of each prompt.
        max_new_tokens: Most tokens that may follow each.
        params: How tokens are drawn, without a grammar; text i is drawn with the seed + i.
        grammar: Grammar that the texts must follow, or None.
        client: Who asks.
        cache_salt: Prefixes are reused only from requests with the same salt.
        adapter: Name of the LoRA adapter of all texts; None for the model alone.
        images: What the model takes of the images in each of the prompts, which are equal; None for text.
    """

    numbers: tuple[int, ...]
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    params: SamplingParams
    grammar: GrammarSource | None
    client: str
    cache_salt: str | None
    adapter: str | None = None
    images: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Cancel:
    """Texts that nobody waits for any more. Those that have ended are left alone.

    Attributes:
        numbers: Their numbers.
    """

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class ChangeAdapters:
    """A request to load a LoRA adapter, or to unload one.

    Attributes:
        number: Number of the request.
        name: Name of the adapter.
        path: Directory to load it from; None to unload it.
    """

    number: int
    name: str
    path: str | None


@dataclass(frozen=True)
class AdaptersChanged:
    """The answer to `ChangeAdapters`.

    Attributes:
        number: Number of the request.
        error: Why nothing has changed; None where it has.
    """

    number: int
    error: Exception | None


@dataclass(frozen=True)
class Refused:
    """A request that is not served.

    Attributes:
        numbers: Numbers of its texts.
        error: Why.
    """

    numbers: tuple[int, ...]
    error: Exception


@dataclass(frozen=True)
class EngineFailed:
    """The last message of an engine that cannot go on.

    Attributes:
        reason: Why, in a few words that clients may read.
    """

    reason: str


@dataclass(frozen=True)
class PromptFacts:
    """What is known of a prompt once it is read.

    Attributes:
        reused: How many of its tokens were in the cache already.
        scores: Scores of its tokens but the first; empty unless asked for.
    """

    reused: int
    scores: Sequence[PromptScore] = ()


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        running: Texts that hold a place.
        waiting: Texts that wait for one.
        preempted: Number of texts that were put back into the queue so far.
        cache_usage: Share of the blocks of keys and values that texts hold, 0 to 1.
        host_blocks: Blocks of the host's memory that hold keys and values.
        host_hits: Tokens of prompts whose keys and values were found there alone so far.
    """

    running: int = 0
    waiting: int = 0
    preempted: int = 0
    cache_usage: float = 0.0
    host_blocks: int = 0
    host_hits: int = 0


@dataclass(frozen=True)
class Written:
    """All that half a round wrote.

    Attributes:
        deltas: What texts have gained, with their numbers.
        prompts: What became known of prompts, by the number of their text.
        load: How busy the engine is now.
    """

    deltas: Sequence[tuple[int, SequenceDelta]]
    prompts: Mapping[int, PromptFacts]
    load: EngineLoad
