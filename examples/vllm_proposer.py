"""A custom proposer for vLLM that copies drafts from the text: `"model": "vllm_proposer.CopyProposer"`.

vLLM gives such a proposer the token ids of its sequences, and takes a chain of drafts for each. So a drafter that reads
hidden states cannot run there, and copies can. The file imports neither vLLM nor this library.
"""

from collections.abc import Sequence
from typing import Any


class CopyProposer:
    """Drafts what followed the latest of the longest earlier occurrences of a sequence's last tokens.

    It drafts as `redrafter.PromptLookup` does, except that nothing is drafted after a match that is too short. It
    differs from vLLM's `ngram` in two ways: of equally long matches the latest one wins, not the earliest; and a match
    that reaches the end of the sequence starts over, so that a loop yields a whole chain.

    Example:
        ```python
        llm = LLM("my-base", speculative_config={"model": "vllm_proposer.CopyProposer", "num_speculative_tokens": 4})
        ```

    Attributes:
        ngram: The most last tokens to match; `additional_config={"redrafter": {"ngram": 8}}` of vLLM sets it.
        least_match: The fewest; set in the same way.
        draft_len: K, the most tokens to draft, vLLM's `num_speculative_tokens`.
        max_length: Tokens that a sequence may have.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read the options of a `VllmConfig`; raise `ValueError` for those that are unknown or out of range."""
        options = {"ngram": 8, "least_match": 2} | dict((vllm_config.additional_config or {}).get("redrafter") or {})
        if options.keys() != {"ngram", "least_match"} or not 1 <= options["least_match"] <= options["ngram"]:
            raise ValueError(f"additional_config['redrafter'] needs 1 <= least_match <= ngram, got {options}")
        self.ngram, self.least_match = options["ngram"], options["least_match"]
        self.draft_len: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_length: int = vllm_config.model_config.max_model_len

    def load_model(self, model: object) -> None:
        """Load nothing: vLLM calls this once its model is loaded, on a CPU whether or not a proposer has it."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return the drafts of each sequence; none where it has no match, no room, or no token to draft after.

        Args:
            sampled_token_ids: Tokens that the last step wrote to each sequence; none in the middle of its prompt.
            num_tokens_no_spec: Number of tokens of each sequence, these included, `[B]` int32 of numpy.
            token_ids_cpu: The tokens by position, `[B, T]` int32 of numpy; ignored after these.
            slot_mappings: Ignored, as nothing is stored in vLLM's cache.
        """
        rows = zip(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, strict=False)  # the arrays may have more rows
        return [self._continue(tokens[:length]) if sampled else [] for sampled, length, tokens in rows]

    def _continue(self, tokens: Any) -> list[int]:
        """Return the tokens that follow the best match in `tokens`, `[T]` of numpy.

        Same result as `latest_match` and `copy_from` of `drafting/prompt_lookup.py`, in a single pass over the tokens
        of one sequence: those compare `ngram` times as many on a device, where this runs between two steps on the host.
        """
        last = len(tokens) - 1
        ends = (tokens[:-1] == tokens[-1:]).nonzero()[0]  # positions whose token is the last one's, in their order
        if not len(ends):
            return []
        matched = 1
        while matched < self.ngram:
            earlier = ends[ends >= matched]
            longer = earlier[tokens[earlier - matched] == tokens[last - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        count = min(self.draft_len, self.max_length - len(tokens))
        if matched < self.least_match or count <= 0:
            return []
        following: list[int] = tokens[int(ends[-1]) + 1 :][:count].tolist()
        return [following[i % len(following)] for i in range(count)]
