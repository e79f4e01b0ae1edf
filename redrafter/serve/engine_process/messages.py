"""Messages between a server and a loaded engine. The server numbers the sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redrafter.errors import ReDrafterError
from redrafter.grammar.source import GrammarSource
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.logprobs import PromptScore
from redrafter.scheduler.sequence import SequenceDelta


@dataclass(frozen=True)
class Submit:
    """A request to generate one sequence for each prompt."""

    prompts: Sequence[Sequence[int]]  # token ids
    max_new_tokens: int  # most tokens to generate for each prompt
    params: SamplingParams  # sampling parameters without a grammar; sequence i adds i to the seed
    grammar: GrammarSource | None = None  # grammar that constrains the sequences
    client: str = ""  # identifies the client for fair scheduling
    priority: int = 0  # lower numbers are served first
    cache_salt: str | None = None  # prefixes are reused only from requests with the same salt
    adapter: str | None = None  # name of the LoRA adapter of all sequences; None for the base model
    # Model inputs for the images, equal for all prompts. They may take hundreds of megabytes.
    images: dict[str, Any] | None = None
    request_id: str = ""  # identifies the request in logs
    numbers: tuple[int, ...] = ()  # number of each sequence, chosen by the server


@dataclass(frozen=True)
class Cancel:
    """A request to abort sequences by number. Numbers of ended sequences are ignored."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class ChangeAdapters:
    """A numbered request to load a LoRA adapter from a directory, or to unload it if `path` is None."""

    name: str
    path: str | None
    number: int = 0  # chosen by the server, as that of each change


@dataclass(frozen=True)
class ChangeEngine:
    """A numbered request to change the engine between two steps.

    `kind` is a key of `Extension.changes`. `path` is a directory or a file of the engine's machine; None for a change
    that needs none, or, for a drafter, to restore the previous one.
    """

    kind: str
    path: str | None = None
    number: int = 0


@dataclass(frozen=True)
class Answered:
    """The answer to a change, or to a rejected `Submit`: the error, or None if the change succeeded.

    `not_finite` lists tensors of new weights with NaN or infinite values.
    """

    numbers: tuple[int, ...]
    error: ReDrafterError | None
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alive:
    """A sign of life, which an engine sends regularly: its rounds advance, or it has no work."""


class EngineError(ReDrafterError):
    """An internal failure of the engine. Only the engine's log has the reason, which clients must not see."""


@dataclass(frozen=True)
class EngineFailed:
    """The last message of an engine that cannot continue: a short reason that clients may read."""

    reason: str


@dataclass(frozen=True)
class EngineLoad:
    """Load and state of an engine."""

    running: int = 0  # number of sequences that hold a slot
    waiting: int = 0  # number of sequences that wait for a slot
    preempted: int = 0  # number of preemptions so far
    cache_usage: float = 0.0  # fraction of KV blocks held by sequences, 0 to 1
    host_blocks: int = 0  # number of KV blocks in host memory
    host_hits: int = 0  # number of prompt tokens found only in host memory so far
    asleep: bool = False  # whether the engine sleeps, so that no sequence advances
    drafter: int = 0  # number of drafter changes so far, which identifies the drafter


@dataclass(frozen=True)
class Written:
    """Output of half a scheduler round."""

    deltas: Sequence[tuple[int, SequenceDelta]]  # sequence numbers with new deltas
    # By sequence number, once known: number of leading prompt tokens found in the cache, seconds of waiting for a slot,
    # and scores of the prompt's tokens after the first (empty unless requested).
    prompts: Mapping[int, tuple[int, float | None, Sequence[PromptScore]]]
    load: EngineLoad  # current load


FromServer: TypeAlias = Submit | Cancel | ChangeAdapters | ChangeEngine
