"""What a server and a loaded engine say to each other. Texts have numbers, which the server gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter.errors import ReDrafterError
from redrafter.grammar.source import GrammarSource
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.logprobs import PromptScore
from redrafter.scheduler.sequence import SequenceDelta


@dataclass(frozen=True)
class Submit:
    """A request for texts."""

    prompts: Sequence[Sequence[int]]  # token ids
    max_new_tokens: int  # most tokens that may follow each
    params: SamplingParams  # how tokens are drawn, without a grammar; text i is drawn with the seed + i
    grammar: GrammarSource | None = None  # that the texts must follow
    client: str = ""  # who asks, as far as fairness goes
    priority: int = 0  # those of lower numbers are served first
    cache_salt: str | None = None  # prefixes are reused only from requests with the same salt
    adapter: str | None = None  # name of the LoRA adapter of all texts; None for the model alone
    # What the model takes of the images in each of the prompts, which are equal. It may be hundreds of megabytes.
    images: dict[str, Any] | None = None
    request_id: str = ""  # by which logs name the request
    numbers: tuple[int, ...] = ()  # number of each text, which the client gives it


@dataclass(frozen=True)
class Cancel:
    """Numbers of texts to abort. Those that have ended are left alone."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class ChangeAdapters:
    """A request, with a number of its own, to load a LoRA adapter from a directory, or to unload it: path None."""

    number: int
    name: str
    path: str | None


@dataclass(frozen=True)
class ChangeEngine:
    """A request, with a number of its own, to change the engine between two steps.

    `kind` is a key of `Extension.changes`. `path` is a directory or a file of the engine's machine; None for a change
    that needs none, or, of a drafter, for the one before.
    """

    number: int
    kind: str
    path: str | None = None


@dataclass(frozen=True)
class Answered:
    """The answer to a request for a change, and to a `Submit` that is not served: why; None where all is changed.

    `not_finite` has the names of tensors of new weights in which numbers are NaN or infinite.
    """

    numbers: tuple[int, ...]
    error: ReDrafterError | None
    not_finite: tuple[str, ...] = ()


class EngineError(ReDrafterError):
    """Something failed for a reason within the engine, which its log has: the message names none of it."""


@dataclass(frozen=True)
class EngineFailed:
    """The last message of an engine that cannot continue: why, in a few words that clients may read."""

    reason: str


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is."""

    running: int = 0  # sequences that hold a slot
    waiting: int = 0  # sequences that wait for one
    preempted: int = 0  # number of sequences that were put back into the queue so far
    cache_usage: float = 0.0  # share of the blocks of keys and values that sequences hold, 0 to 1
    host_blocks: int = 0  # blocks of the host's memory that hold keys and values
    host_hits: int = 0  # tokens of prompts whose keys and values were found there alone so far
    asleep: bool = False  # whether the engine sleeps, so that nothing is written
    drafter: int = 0  # number of the drafter: how often it was changed so far


@dataclass(frozen=True)
class Written:
    """All that half a round wrote."""

    deltas: Sequence[tuple[int, SequenceDelta]]  # what texts have gained, with their numbers
    # How many leading tokens of prompts were in the cache already, the seconds for which they waited for a place, and
    # scores of their tokens but the first (empty unless asked for), by the number of their text, once that is known.
    prompts: Mapping[int, tuple[int, float | None, Sequence[PromptScore]]]
    load: EngineLoad  # now
