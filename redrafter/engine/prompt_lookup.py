"""PromptLookup: a Hugging Face model with drafts copied from its own sequence."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from redrafter.checkpoints.models import bind, locate_gguf
from redrafter.drafting.policy import CostPolicy, DraftPolicy
from redrafter.drafting.prompt_lookup import WithPromptLookup
from redrafter.drafting.proposer import UNDRAFTED
from redrafter.engine.engine import Engine
from redrafter.engine.options import split_keywords, takes_options
from redrafter.model.target import Target
from redrafter.scheduler.paged_memory import PagedMemory


class PromptLookup(Engine):
    """A target with drafts copied from its own sequence: needs no second model, but gains only on repetitive output.

    Example:
        ```python
        engine = PromptLookup.from_pretrained("my-base", ngram=2, draft_len=4)
        ids = engine.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=100)
        ```
    """

    def draft_policy(self, sizes: Sequence[int], memory: PagedMemory | None) -> DraftPolicy:
        """Return a policy that omits drafts while they do not pay; with `pauses` off, only where nothing repeats."""
        if not self.pauses:
            return super().draft_policy(sizes, memory)
        return CostPolicy(self.times_by(self._assumed), {}, self.histories, dict.fromkeys(sizes, self.proposer))

    @classmethod
    @takes_options
    def from_pretrained(
        cls, model: str | Path | PreTrainedModel | Target, *, ngram: int = 2, draft_len: int = 4, **keywords: object
    ) -> "PromptLookup":
        """Load a target.

        Args:
            model: A hub id, a directory, a GGUF file, or a model that is loaded or bound.
            ngram: Maximum number of last tokens to search for earlier in the sequence.
            draft_len: Tokens drafted per step.
            keywords: `dtype`, `device`, `tp_size`, `trust_remote_code`, `quantization` and `adapters`, as in
                `ReDrafter.from_pretrained`; fields of `EngineOptions`; all others are passed to `AutoModelForCausalLM`.

        Raises:
            CheckpointError: When the model cannot be loaded.
            UnsupportedError: When the model cannot be decoded here.
            ArgumentError: For an argument that is unknown or out of range.
        """
        options, load, adapters = split_keywords(cls.from_pretrained, keywords)
        model = locate_gguf(model, load)
        proposer = WithPromptLookup(UNDRAFTED, draft_len, ngram)
        engine = cls(bind(model, **load), proposer, options)
        engine.load_adapters(adapters)
        return engine
