"""ReDrafter: a Hugging Face model with its drafter."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from redrafter.checkpoints.drafters import check_beams, check_pair, draft_length_warning, load_drafter
from redrafter.checkpoints.models import bind, check_quantization, locate_gguf
from redrafter.drafting.drafter_model import DrafterModel, check_draft_ids
from redrafter.drafting.policy import CostPolicy, DraftPolicy
from redrafter.drafting.proposer import Proposer, SearchProposer
from redrafter.drafting.step_times import StepCosts, StepTimes
from redrafter.drafting.tree_choice import SHARING_ROWS, best_tree
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions, split_keywords, takes_options
from redrafter.engine.step_timing import KeptCosts
from redrafter.errors import warn
from redrafter.formats.sources import load_drafter_model
from redrafter.model.target import Target
from redrafter.scheduler.captured_step import bucket
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.tree.beam_search import node_count
from redrafter.tree.sizes import TreeShape


class ReDrafter(Engine):
    """A target with its drafter: a trained one of any kind, or a table of recycled tokens.

    Attributes:
        adapts: Whether steps choose their trees by costs and gains, because no shape was requested.

    Example:
        ```python
        engine = ReDrafter.from_pretrained("my-base", "my-drafter")
        ids = engine.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=100)
        ```
    """

    proposer: SearchProposer
    drafter: DrafterModel

    def __init__(
        self,
        target: Target,
        drafter: DrafterModel,
        shape: TreeShape | None = None,
        *,
        options: EngineOptions | None = None,
    ):
        """Bind a target to its drafter.

        Args:
            target: The bound model that generates.
            drafter: The drafter that was trained for it.
            shape: Beam search and tree. Fields that are None come from the drafter's config; the node budget, from the
                device and the batch size.
            options: Limits of memory and lengths; None for the defaults.
        """
        self._check_bound(target, Target)
        self._check_bound(drafter, DrafterModel)
        config = drafter.config
        check_draft_ids(drafter.draft_ids, config.draft_vocab_size, config.vocab_size, "the drafter")
        shape, depth = shape or TreeShape(), config.draft_len_per_beam
        self.adapts = shape == TreeShape()
        if target.device.type == "cpu" and shape.node_budget is None:
            # Hardly any of the few nodes that a CPU verifies are deeper than the drafter was trained for, and each
            # level costs: the boxed pair with 12 nodes decodes 8 to 16 % fewer tokens/s with 5 x 9 than with 5 x 5.
            depth = min(depth, config.trained_draft_len or depth)
        self._default = TreeShape(config.draft_beams, depth)
        shape = shape.over(self._default)
        if message := draft_length_warning(config, shape.draft_len_per_beam):
            warn(message)
        # Before the cache layer below, whose width may depend on the hidden states that the drafter reads.
        target.read_aux_hidden(drafter.layers_read(target))
        compiled = target.device.type == "cuda" and (options or EngineOptions()).compile
        if (layer := drafter.stored_layer(target, compiled)) is not None:
            target.store_drafter_layer(layer)
        self.drafter, self.shape = drafter, shape
        self._kept: KeptCosts | None = None  # on disk, of the costs that were measured
        self._best: dict[tuple[StepCosts, int, bool], TreeShape] = {}
        self._proposers: dict[TreeShape, SearchProposer] = {}
        self._compiled = compiled
        drafter.prepare(target)
        super().__init__(target, self._propose(target, shape), options)

    @classmethod
    @takes_options
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        drafter: str | Path | DrafterModel | None = None,
        *,
        num_beams: int | None = None,
        draft_len_per_beam: int | None = None,
        node_budget: int | None = None,
        draft_quantization: str | None = None,
        base_embedding: bool = False,
        **keywords: object,
    ) -> "ReDrafter":
        """Load a target and its drafter; both may be a hub id, a directory or a loaded object.

        Args:
            model: The target; also a GGUF file, or the directory or hub id that contains the file named by
                `gguf_file=`.
            drafter: The drafter, this project's, or an EAGLE-3 head or a DFlash or DSpark drafter in another project's
                format; None for the one in a merged checkpoint, such as `boxed_pair()`, for an MTP layer, and where
                there is neither for an empty table of recycled tokens.
            num_beams: Width of the beam search; None for the checkpoint's default.
            draft_len_per_beam: Depth of the beam search; None for the checkpoint's default.
            node_budget: Nodes verified per step, 1 + beams * length at most; None for a number that suits the device
                and the batch size.
            draft_quantization: As `quantization`, for the drafter, its head included.
            base_embedding: Whether to draft with the target's embedding table instead of the drafter's own, which some
                published EAGLE-3 heads hold untrained.
            keywords: The arguments below, and fields of `EngineOptions`; all others are passed to
                `AutoModelForCausalLM`.

        Keyword Args:
            dtype (str | torch.dtype): The models' dtype; "auto" for the checkpoint's, and for float32 where a CPU
                computes weights of 4 and 8 bits.
            device (str | torch.device | None): Device of the models; None for the device that Hugging Face chooses for
                the target.
            tp_size (int): Processes that share the target, each with a shard of it and the whole drafter. All run the
                same program, started with `torchrun --nproc-per-node tp_size`.
            trust_remote_code (bool): Whether code that comes with the checkpoint may run.
            quantization (str | None): How to quantise the weights of the target's linear layers when it is loaded:
                "int4" or "int8", in groups of 32 inputs, with the head in 8 bits; or "fp8", with inputs rounded too,
                and without the head. A word for how the checkpoint is stored, such as "gguf" or "awq", is checked;
                "gguf" keeps weights as stored on a GPU too. None leaves the weights unchanged.
            adapters (Mapping[str, str | Path] | None): LoRA adapters to load: names, and the directories that PEFT's
                `save_pretrained` wrote.

        Raises:
            CheckpointError: When a checkpoint cannot be loaded.
            MismatchError: When the drafter belongs to another model.
            UnsupportedError: When the model cannot be decoded here.
            ArgumentError: For an argument that is unknown or out of range.
        """
        asked = TreeShape(num_beams, draft_len_per_beam, node_budget)
        options, load, adapters = split_keywords(cls.from_pretrained, keywords)
        model = locate_gguf(model, load)
        check_quantization(load["quantization"], model)
        check_quantization(draft_quantization, drafter, "draft_quantization")
        # Refuse a wrong drafter before the target's weights are loaded.
        if isinstance(drafter, str | Path):
            drafter = load_drafter_model(drafter)
        check_pair(model, drafter, load)
        target = bind(model, **load)
        drafter, saved = load_drafter(model, drafter, target, load.get("revision"), draft_quantization, base_embedding)
        merged = saved.shape
        # The checkpoint's copy of the drafter's default is no request: on a CPU, fewer levels may be drafted.
        if merged.draft_len_per_beam == drafter.config.draft_len_per_beam:  # nobody chose another than the drafter's
            merged = replace(merged, draft_len_per_beam=None)
        engine = cls(target, drafter, asked.over(merged), options=options)
        engine.adapts = asked == TreeShape() and merged.node_budget is None
        engine.do_sample = saved.do_sample
        engine.load_adapters(adapters)
        return engine

    def proposer_for(self, rows: int) -> Proposer:
        """Return the proposer for a batch of `rows` rows.

        Its tree is the best one by the costs of steps, measured or assumed, unless a node budget was requested.
        """
        return self._best_proposer(rows, sampled=False)

    def _best_proposer(self, rows: int, *, sampled: bool) -> Proposer:
        shape = self.shape
        if shape.node_budget is None:
            # Buckets of batch sizes share one entry, as their best trees hardly differ.
            key = self._costs, bucket(rows), sampled
            if key not in self._best:
                share = self.target.varlen.ok and rows >= SHARING_ROWS
                self._best[key] = best_tree(key[0], self.proposer, key[1], share=share, sampled=sampled)
            shape = self._best[key]
        return self._with_copies(self._propose(self.target, shape), rows)

    def derive(self) -> None:
        """Rebuild the drafter's tables from its weights."""
        super().derive()
        self.drafter.prepare(self.target)

    def draft_policy(self, sizes: Sequence[int], memory: PagedMemory | None) -> DraftPolicy:
        """Return the policy that chooses the drafts of steps of these batch sizes.

        A step drafts the tree of `proposer_for`, copies, both or nothing. With `pauses` off, each step drafts the tree.
        """
        if not self.pauses:
            return super().draft_policy(sizes, memory)
        costs = self.step_costs(memory)
        candidates, copying, sampled = dict[int, list[Proposer]](), dict[int, Proposer](), dict[int, list[Proposer]]()
        for size in sizes:
            tree = self.proposer_for(size)
            # A CPU's steps know whether the text has something to copy. On a GPU each further kind of step would have
            # to be captured, which costs more than copies that are rejected.
            alone = tree.without_text if self.target.device.type == "cpu" else None
            candidates[size] = sampled[size] = [tree] if alone is None else [alone, tree]
            if self.proposer.sampled_likelihoods is not None:
                # Copies gain little then: they are judged apart from the tree on every device.
                tree = self._best_proposer(size, sampled=True)
                sampled[size] = [tree] if tree.without_text is None else [tree.without_text, tree]
            if (copies := self._with_copies(self.undrafted, size)).depth:
                copying[size] = copies
        return CostPolicy(self.times_by(costs), candidates, self.histories, copying, sampled)

    def step_costs(self, memory: PagedMemory | None) -> StepCosts:
        """Return the costs of steps: on a GPU's paged cache those of an earlier start, or measured; else assumed."""
        if memory is None or self.target.device.type == "cpu":
            return self._assumed
        # Once per engine: measuring takes seconds, as it compiles kernels and captures graphs.
        with self._lock:
            if self._measured is None:
                self._kept = KeptCosts(memory, self.proposer)
                self._measured = self._kept.find_or_measure()
            return self._measured

    def times_by(self, costs: StepCosts) -> StepTimes:
        """Return the times of steps by these costs; where real steps show that they are wrong, they are not kept."""
        known, times = self.step_times, super().times_by(costs)
        if self._kept is not None and times is not known:
            times.on_wrong = self._kept.forget
        return times

    def _propose(self, target: Target, shape: TreeShape) -> SearchProposer:
        """Return the proposer of a shape, always the same object, since captured steps are keyed by it."""
        shape = shape.over(self._default)
        check_beams(self.drafter.config, shape.beams)
        shape = replace(shape, node_budget=node_count(shape.node_budget, shape.beams, shape.depth, target.device))
        if (known := self._proposers.get(shape)) is None:
            sizes = shape.beams, shape.depth, shape.nodes, shape.shared_nodes
            known = self._proposers[shape] = self.drafter.proposer(target, *sizes, self._compiled)
        return known
