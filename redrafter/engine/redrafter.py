"""ReDrafter: a Hugging Face model with a drafter of its own."""

import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from redrafter.checkpoints.drafters import check_beams, draft_length_warning, load_drafter
from redrafter.checkpoints.merged import TreeShape
from redrafter.checkpoints.models import bind, check_quantization
from redrafter.drafting.draft_length import step_cost
from redrafter.drafting.drafter_types import Drafter
from redrafter.drafting.prompt_lookup import TextBeside
from redrafter.drafting.proposer import Proposer, SearchProposer
from redrafter.engine.arguments import check_bound
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions, split_keywords, takes_options
from redrafter.engine.tuning import Tuning, default_shape, find_tuning, text_nodes
from redrafter.files.checkpoint_kind import check_drafter
from redrafter.formats.sources import load_foreign
from redrafter.model.linear_layers import forward_bytes
from redrafter.model.target import Target
from redrafter.tree.beam_search import node_count


class ReDrafter(Engine):
    """A target with its drafter: a recurrent one, an EAGLE-3 head, an MTP layer or a DFlash drafter.

    Attributes:
        pauses: Whether steps draft nothing for a while where drafts gain less than they cost. It changes no token.

    Example:
        ```python
        engine = ReDrafter.from_pretrained("my-base", "my-drafter")
        ids = engine.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=100)
        ```
    """

    pauses = True
    proposer: SearchProposer

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        shape: TreeShape | None = None,
        *,
        options: EngineOptions | None = None,
        tuning: Tuning | None = None,
    ):
        """Bind a target to its drafter.

        Args:
            target: The bound model whose text is wanted.
            drafter: The drafter that was trained for it.
            shape: Beam search and tree. What it leaves open comes from the drafter's config; the node budget, from the
                device and the batch size.
            options: Limits of memory and lengths; None for the defaults.
            tuning: Shapes by batch size, in place of `shape`.
        """
        check_bound(type(self), target, Target)
        check_bound(type(self), drafter, Drafter)
        config = drafter.config
        shape, depth = shape or TreeShape(), config.draft_len_per_beam
        if target.device.type == "cpu" and shape.node_budget is None:
            # Of the few nodes that a CPU verifies, hardly any are deeper than the drafter was trained for, and each
            # level costs: the boxed pair with 12 nodes writes 8 to 16 % fewer tokens/s with 5 x 9 than with 5 x 5.
            depth = min(depth, config.trained_draft_len or depth)
        self._default = TreeShape(config.draft_beams, depth)
        shape = shape.over(self._default)
        if message := draft_length_warning(config, shape.draft_len_per_beam):
            warnings.warn(message, stacklevel=3)
        target.read_aux_hidden(drafter.layers_read(target))
        compiled = target.device.type == "cuda" and (options or EngineOptions()).compile
        if (layer := drafter.stored_layer(target, compiled)) is not None:
            target.store_drafter_layer(layer)
        self.drafter, self.tuning, self.shape = drafter, tuning, shape
        self._proposers: dict[tuple[int, int, int, int | None], SearchProposer] = {}
        self._with_text: dict[tuple[int, int], TextBeside] = {}
        self._compiled = compiled
        drafter.prepare(target)
        super().__init__(target, self._propose(target, shape), options)
        for tuned in tuning.shapes.values() if tuning is not None else ():
            if tuned is not None:
                self._propose(target, tuned)  # a shape that this drafter cannot have is refused here

    @classmethod
    @takes_options
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        drafter: str | Path | Drafter | None = None,
        *,
        num_beams: int | None = None,
        draft_len_per_beam: int | None = None,
        node_budget: int | None = None,
        tuning: str | Path | None = "auto",
        draft_quantization: str | None = None,
        **keywords: Any,
    ) -> "ReDrafter":
        """Load a target and its drafter; both may be a hub id, a directory or a loaded object.

        Args:
            model: The target.
            drafter: The drafter, this project's, or an EAGLE-3 head or a DFlash or DSpark drafter in the directory of
                another project; None where `model` is a merged checkpoint, such as `boxed_pair()`, or has an MTP
                layer.
            num_beams: Width of the beam search; None for the checkpoint's.
            draft_len_per_beam: Depth of the beam search; None for the checkpoint's.
            node_budget: Nodes verified per step, 1 + beams * length at most; None for as many as suit the device and
                the batch size.
            tuning: Shapes by batch size: from the file that `redrafter tune` wrote for this pair on this device if
                there is one ("auto"), from the file at a path, or not at all (None). Any of the three arguments before
                it, where given, wins over all of it.
            draft_quantization: As `quantization`, for the drafter, its head included.
            keywords: What follows, and fields of `EngineOptions`; all others are for `AutoModelForCausalLM`.

        Keyword Args:
            dtype (str | torch.dtype): The models' dtype; "auto" for the checkpoint's.
            device (str | torch.device | None): Where the models go; None for where Hugging Face puts the target.
            tp_size (int): Processes that share the target, each with a part of it and the whole drafter. All run the
                same program, started with `torchrun --nproc-per-node tp_size`.
            trust_remote_code (bool): Whether code that comes with the checkpoint may run.
            quantization (str | None): "fp8" to quantise the weights of the target's linear layers to FP8 when it is
                loaded, its head apart, and to round the inputs of these layers; None to leave them as they are.
            adapters (Mapping[str, str | Path] | None): LoRA adapters to load: names, and the directories that PEFT's
                `save_pretrained` wrote.

        Raises:
            CheckpointError: When a checkpoint cannot be loaded.
            MismatchError: When the drafter, or the tuning, belongs to another model.
            UnsupportedError: When the model cannot be decoded here.
            ArgumentError: For an argument that is unknown or out of range.
        """
        asked = TreeShape(num_beams, draft_len_per_beam, node_budget)
        options, load, adapters = split_keywords(cls.from_pretrained, keywords)
        check_quantization(draft_quantization, drafter, "draft_quantization")
        if isinstance(drafter, str | Path):
            drafter = load_foreign(drafter) or drafter
        if isinstance(drafter, str | Path):
            check_drafter(drafter)
        target = bind(model, **load)
        drafter, defaults = load_drafter(model, drafter, target, load.get("revision"), draft_quantization)
        shapes = find_tuning(tuning, target, drafter) if asked == TreeShape() else None
        merged = defaults.shape
        if merged.draft_len_per_beam == drafter.config.draft_len_per_beam:  # nobody chose another than the drafter's
            merged = replace(merged, draft_len_per_beam=None)
        engine = cls(target, drafter, asked.over(merged), options=options, tuning=shapes)
        engine.do_sample = defaults.do_sample
        engine.load_adapters(adapters)
        return engine

    def proposer_for(self, rows: int) -> Proposer:
        """Return the proposer for a batch of `rows` rows.

        Its shape follows from the tuning, if there is one; else from what a forward over so many nodes costs on the
        device, unless a node budget was asked for.
        """
        shape: TreeShape | None = self.shape
        if self.tuning is not None:
            shape = self.tuning.shape_for(rows)
        elif self.shape.node_budget is None:
            searched, device = self.proposer, self.target.device.type
            shape = default_shape(rows, searched.beams, searched.depth, device, share=self.target.varlen.ok)
            if shape is not None and not shape.shared_nodes and (shape.node_budget or 0) >= self.proposer.nodes:
                shape = self.shape
        if shape is None:
            return self.plain
        proposer = self._propose(self.target, shape)
        # Recurrent layers are called once for each level, and a chain would add as many levels as it has drafts.
        copies = self.options.draft_from_text and proposer.shared_nodes is None and not self.target.keeps_states
        count = text_nodes(rows, proposer.nodes, self.target.device.type) if copies else 0
        if not count:
            return proposer
        return self._with_text.setdefault((id(proposer), count), TextBeside(proposer, count))

    def draft_step_cost(self, rows: int) -> float | None:
        """Return the time of a step of `rows` rows with drafts, in steps without; None where drafting never pauses.

        It is what the tuning measured, if there is one that did; else what `step_cost` says.
        """
        if not self.pauses:
            return None
        if self.tuning is not None and (measured := self.tuning.step_cost_for(rows)) is not None:
            return measured
        return self._step_cost

    @cached_property
    def _step_cost(self) -> float:
        # Ranks must agree, and their parts of the target may differ in size.
        read = self.proposer.draft_bytes if self.target.ranks.size == 1 else 0
        return step_cost(self.target.device.type, read, forward_bytes(self.model))

    def _propose(self, target: Target, shape: TreeShape) -> SearchProposer:
        """Return the proposer of a shape, the same object each time, as captured steps are kept by it."""
        shape = shape.over(self._default)
        beams, depth = shape.num_beams, shape.draft_len_per_beam
        assert beams is not None
        assert depth is not None
        check_beams(self.drafter.config, beams)
        nodes = node_count(shape.node_budget, beams, depth, target.device)
        new = self.drafter.proposer(target, beams, depth, nodes, shape.shared_nodes, self._compiled)
        return self._proposers.setdefault((beams, depth, nodes, shape.shared_nodes), new)
