"""The request of one sequence to an engine, and the check that it can be served.

`generate`, its coroutines and a server translate a call into these requests. `Scheduler.submit` checks all of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redrafter.errors import ArgumentError

if TYPE_CHECKING:  # the server reports mistakes of its options before torch is imported
    from redrafter.model.images import ImageInputs, ImagePrompt
    from redrafter.model.lora import Adapter
    from redrafter.sampling.params import SamplingParams


@dataclass(frozen=True)
class RequestBounds:
    """Limits the requests that an engine can serve. A server has those of the engine in another process.

    Attributes:
        vocab_size: Number of token ids.
        max_seq_len: Most tokens of a sequence, prompt included.
        max_input_len: Most tokens of a prompt; None for as many as leave room for one more.
        draft_depth: Most successive drafts of a step.
    """

    vocab_size: int
    max_seq_len: int
    max_input_len: int | None = None
    draft_depth: int = 0

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        longest = self.max_seq_len - 1
        return longest if self.max_input_len is None else min(self.max_input_len, longest)


@dataclass(frozen=True, eq=False)  # comparing fields would look through whole prompts
class GenerationRequest:
    """Requests the continuation of one prompt.

    Attributes:
        prompt: Token ids.
        max_new_tokens: Most tokens that may follow; 0 if the prompt is only to be read.
        params: How tokens are drawn.
        client: The client that requested the sequence. Clients share the server fairly.
        priority: Sequences with lower numbers are served first, and may preempt sequences with higher ones.
        cache_salt: Only sequences with the same salt share blocks of the cache.
        adapter: LoRA adapter of its forwards; None for the model alone.
        keeps: Tensors reported with its tokens: "logits", "scores" (the logits after processors), both or neither.
        images: The images of the prompt; None for a prompt without any.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    params: "SamplingParams"
    client: str = ""
    priority: int = 0
    cache_salt: str | None = None
    adapter: "Adapter | None" = None
    keeps: frozenset[str] = frozenset()
    images: "ImageInputs | ImagePrompt | None" = None


def check_requests(requests: Sequence[GenerationRequest], bounds: RequestBounds) -> None:
    """Raise `ArgumentError` for a request that can never be served within these bounds."""
    checked: set[int] = set()  # several sequences after one prompt share it
    for request in requests:
        params = request.params
        if id(request.prompt) not in checked:
            check_prompt(request.prompt, bounds)
            checked.add(id(request.prompt))
        check_token_ids(params.stop_token_ids, bounds.vocab_size)
        check_token_ids(params.logit_bias, bounds.vocab_size)
        check_draft_limit(params.num_speculative_tokens, bounds.draft_depth)
        for name, most in (("top_k", 62), ("min_new_tokens", 62), ("seed", 63)):
            if not 0 <= getattr(params, name) < 1 << most:
                raise ArgumentError(f"{name} must be from 0 to 2**{most} - 1, got {getattr(params, name)}")


def check_prompt(prompt: Sequence[int], bounds: RequestBounds) -> None:
    """Raise `ArgumentError` for a prompt that is empty, too long, or has an id out of range."""
    if not prompt:
        raise ArgumentError("the prompt is empty")
    if len(prompt) > bounds.longest_prompt:
        raise too_long(len(prompt), bounds)
    check_token_ids(prompt, bounds.vocab_size)


def too_long(count: object, bounds: RequestBounds) -> ArgumentError:
    """Return the error about a prompt of too many tokens, a number or words for it."""
    return ArgumentError(
        f"the prompt has {count} tokens; a prompt may have {bounds.longest_prompt}, and with its answer "
        f"{bounds.max_seq_len}: shorten it"
    )


def check_token_ids(ids: Collection[int], vocab_size: int, what: str = "token id") -> None:
    """Raise `ArgumentError` for an id that is not in the vocabulary: on a GPU it would end the process."""
    # min and max, not a loop: an event loop waits for it, and a request may have a million tokens.
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ArgumentError(f"{what} {token} is out of range: the model has {vocab_size} ids, from 0")


def check_draft_limit(limit: int | None, depth: int) -> None:
    """Raise `ArgumentError` for a limit of drafts that is out of the range of an engine's `depth`."""
    if limit is not None and not 0 <= limit <= depth:
        allowed = "0: nothing drafts here"
        if depth:
            allowed = f"within the drafts of this engine (0 to {depth}; 0 for no drafts)"
        raise ArgumentError(f"num_speculative_tokens must be {allowed}, got {limit}")
