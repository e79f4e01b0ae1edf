"""DraftTarget: a Hugging Face model with a smaller one that drafts for it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from redrafter import features
from redrafter.checkpoints.models import bind, check_quantization, locate_gguf
from redrafter.checkpoints.vocabularies import Tokenizer, map_unlike_vocabularies
from redrafter.drafting.draft_model import DraftModelProposer
from redrafter.drafting.policy import CostPolicy, DraftPolicy
from redrafter.drafting.proposer import Proposer
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions, split_keywords, takes_options
from redrafter.errors import ArgumentError
from redrafter.model.supported import base_of
from redrafter.model.target import Target
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.tree.beam_search import node_count
from redrafter.tree.sizes import check_size

Acceptance = Literal["match", "rejection"]
ACCEPTANCE: tuple[Acceptance, ...] = ("match", "rejection")

CAPTURED_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # draft lengths for which steps are captured, up to the longest


class DraftTarget(Engine):
    """A target and a draft model: a smaller LM, used unchanged and without training.

    A draft model with the target's own vocabulary drafts best. One with another tokenizer drafts the tokens that both
    have.

    Example:
        ```python
        engine = DraftTarget.from_pretrained("my-70b", "my-1b", draft_len=4)
        ids = engine.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=100)
        ```
    """

    def __init__(
        self,
        target: Target,
        draft_model: Target,
        *,
        draft_len: int = 4,
        num_beams: int = 1,
        node_budget: int | None = None,
        acceptance: Acceptance = "match",
        adaptive: bool = False,
        vocabulary: VocabularyMap | None = None,
        options: EngineOptions | None = None,
    ):
        """Take the arguments of `from_pretrained`, with both models bound and their tokenizers compared."""
        for name, value in (("draft_len", draft_len), ("num_beams", num_beams), ("node_budget", node_budget)):
            if value is not None or name != "node_budget":
                check_size(name, value)
        if acceptance not in ACCEPTANCE:
            raise ArgumentError(f"acceptance must be one of {', '.join(ACCEPTANCE)}, got {acceptance!r}")
        if not isinstance(adaptive, bool):
            raise ArgumentError(f"adaptive must be True or False, got {adaptive!r}")
        if acceptance == "rejection":
            chosen = features.FeatureSet(f"num_beams={num_beams}, adaptive={adaptive}")
            chosen.add(features.DRAFT_TREES, num_beams > 1)
            chosen.add(features.ADAPTIVE_DRAFTS, adaptive)
            chosen.check(features.REJECTION_SAMPLING)
        self._check_bound(target, Target)
        self._check_bound(draft_model, Target)
        if draft_model.device != target.device:
            message = f"the draft model is on {draft_model.device} and the target on {target.device}: move one"
            raise ArgumentError(message)
        if vocabulary is not None:
            draft_model.features.check(features.OTHER_TOKENIZER)
            vocabulary = vocabulary.fit(target.vocab_size, draft_model.vocab_size).to(draft_model.device)
        common = min(target.vocab_size, draft_model.vocab_size) if vocabulary is None else vocabulary.shared_count
        if num_beams > common:
            message = f"num_beams={num_beams} is more than the tokens that the draft model can draft: {common}"
            raise ArgumentError(message)
        self.draft_vocabulary = vocabulary
        self.rejection_sampling = acceptance == "rejection"
        self.acceptance, self.adaptive, self.draft_len = acceptance, adaptive, draft_len
        shorter = CAPTURED_LENGTHS if target.device.type == "cuda" else range(1, draft_len)
        # Captured lengths are few, as each has its own graphs; a CPU can use any length.
        lengths = {draft_len, *(length for length in shorter if adaptive and length < draft_len)}
        self._by_length = {
            length: DraftModelProposer(
                model=draft_model,
                vocab_size=target.vocab_size,
                beams=num_beams,
                depth=length,
                nodes=node_count(node_budget, num_beams, length, target.device),
                sampled=self.rejection_sampling,
                vocabulary=vocabulary,
            )
            for length in sorted(lengths, reverse=True)
        }
        super().__init__(target, self._by_length[draft_len], options)

    def proposer_for(self, rows: int) -> Proposer:
        """Return the proposer for a batch of `rows` rows, with drafts copied from the sequence where allowed."""
        proposer = self._by_length[self.draft_len]
        unsuited = self.adaptive or self.rejection_sampling or proposer.vocabulary
        if unsuited or features.RECURRENT_STATES in proposer.model.features:
            return proposer
        return self._with_copies(proposer, rows)

    @classmethod
    @takes_options
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel | Target,
        draft_model: str | Path | PreTrainedModel | Target,
        *,
        draft_len: int = 4,
        num_beams: int = 1,
        node_budget: int | None = None,
        acceptance: Acceptance = "match",
        adaptive: bool = False,
        tokenizer: Tokenizer | None = None,
        draft_tokenizer: Tokenizer | None = None,
        draft_quantization: str | None = None,
        draft_model_kwargs: Mapping[str, object] | None = None,
        **keywords: object,
    ) -> "DraftTarget":
        """Load a target and its draft model; both may be a hub id, a directory, a GGUF file, or a loaded model.

        Args:
            model: The target.
            draft_model: The draft model. Where its tokenizer is another one than the target's, it drafts the tokens
                that spell the same bytes in both vocabularies, and reads each other token as several of its own.
            draft_len: Tokens drafted per step, one after the other.
            num_beams: Number of beams; above 1, the draft model's likeliest continuations form a tree.
            node_budget: Nodes of that tree verified per step, 1 + num_beams * draft_len at most; None for as many as
                suit the device.
            acceptance: "match" accepts a draft that equals the target's own draw, so the tokens equal those of
                undrafted decoding, seed by seed; "rejection" accepts it by its probabilities in both models, so the
                tokens differ but have the same distribution (greedy decoding is equal in both).
            adaptive: Draft at most draft_len tokens, fewer where recent drafts were rejected.
            tokenizer: The target's tokenizer, or its path; None for the one in the target's directory, which is found
                by its name for a loaded model.
            draft_tokenizer: The same for the draft model.
            draft_quantization: As `quantization`, for the draft model.
            draft_model_kwargs: Arguments of `AutoModelForCausalLM` for the draft model.
            keywords: `dtype`, `device`, `tp_size` (each process has the whole draft model), `trust_remote_code`,
                `quantization` and `adapters`, as in `ReDrafter.from_pretrained`; fields of `EngineOptions`; all others
                are passed to `AutoModelForCausalLM` for the target.

        Raises:
            CheckpointError: When a model cannot be loaded.
            MismatchError: When the vocabularies have too few tokens in common, or cannot be compared.
            UnsupportedError: When a model, or a combination of arguments, cannot be decoded here.
            ArgumentError: For an argument that is unknown or out of range.
        """
        options, load, adapters = split_keywords(cls.from_pretrained, keywords)
        draft_keywords = dict(draft_model_kwargs or {})
        model = locate_gguf(model, load)
        draft_model = locate_gguf(draft_model, draft_keywords)
        check_quantization(load["quantization"], model)
        check_quantization(draft_quantization, draft_model, "draft_quantization")
        trusted = load["trust_remote_code"]
        # Before any weights are loaded: vocabularies that cannot be mapped are refused in seconds.
        vocabulary = map_unlike_vocabularies(model, draft_model, tokenizer, draft_tokenizer, trusted)
        target = drafting = bind(model, **load)
        # A model that drafts for itself is bound once, so that its weights are not loaded twice.
        if base_of(draft_model) is not target.model:
            draft_load = {name: load[name] for name in ("dtype", "trust_remote_code", "caller")}
            device = target.device if isinstance(draft_model, str | Path) else None
            draft_load |= {"device": device, "quantization": draft_quantization}
            drafting = bind(draft_model, **draft_load | draft_keywords)
        engine = cls(
            target,
            drafting,
            draft_len=draft_len,
            num_beams=num_beams,
            node_budget=node_budget,
            acceptance=acceptance,
            adaptive=adaptive,
            vocabulary=vocabulary,
            options=options,
        )
        engine.load_adapters(adapters)
        return engine

    def draft_policy(self, sizes: Sequence[int], memory: PagedMemory | None) -> DraftPolicy:
        """Return the policy that chooses the drafts of steps of these batch sizes.

        On a CPU, drafts are omitted while they do not pay. A GPU launches a step before the tokens of the last one are
        known, so there a draft model could not read what undrafted steps have written. Rejection sampling writes other
        tokens without drafts. So there each step drafts: a length that pays best, or a fixed one with prompts.
        """
        always = not self.pauses or self.rejection_sampling or self.target.device.type != "cpu"
        if always and not self.adaptive:
            return super().draft_policy(sizes, memory)
        lengths = list(self._by_length.values())
        kinds = {size: lengths if self.adaptive else [self.proposer_for(size)] for size in sizes}
        return CostPolicy(self.times_by(self._assumed), kinds, self.histories, always=always)
