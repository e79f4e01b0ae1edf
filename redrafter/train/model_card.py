"""The model card that a trained drafter carries."""

from typing import Any

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.scheduler.sequence import Stats
from redrafter.train.config import TrainConfig
from redrafter.train.evaluate.shapes import Shape
from redrafter.train.trainer import TrainingResult

__all__ = ["describe_size", "make_model_card", "served_shape"]


def describe_size(model: PreTrainedModel, drafter: RecurrentDrafter) -> str:
    """Describe a drafter's size, e.g. `164,224 parameters, 3.6 % of the base's 4,505,184`."""
    base, size = model.num_parameters(), drafter.num_parameters()
    return f"{size:,} parameters, {100 * size / base:.1f} % of the base's {base:,}"


def served_shape(drafter: RecurrentDrafter) -> Shape:
    """Return the tree shape that a drafter is measured with: its config's beams and depth, with all nodes."""
    beams, depth = drafter.config.draft_beams, drafter.config.draft_len_per_beam
    return Shape(beams, depth, 1 + beams * depth)


def make_model_card(
    model: PreTrainedModel,
    drafter: RecurrentDrafter,
    config: TrainConfig,
    result: TrainingResult,
    validation: Stats | None,
    prompts: int,
    facts: dict[str, Any],
) -> str:
    """Compose the model card of a trained drafter; the caller writes it to README.md.

    Args:
        model: The base.
        drafter: Trained drafter.
        config: Options of the training.
        result: What the training did.
        validation: Result of the last validation; None when there was none.
        prompts: Prompts of the validation.
        facts: Content of training.json, as `provenance` makes it.

    Returns:
        The card: Markdown under a header in YAML.
    """
    base = drafter.config.base_model or type(model).__name__
    tree = served_shape(drafter)
    measured = "not measured: there was nothing to validate on"
    if validation is not None:
        share_by_depth = ", ".join(f"{count / max(validation.steps, 1):.2f}" for count in validation.accepted_by_depth)
        measured = (
            f"{validation.tokens_per_step:.2f} tokens per step, greedy, on texts that the base wrote from {prompts} "
            f"held-out prompts ({tree.beams} beams x {tree.depth} tokens, {tree.nodes} nodes). Part of the steps in "
            f"which at least 1, 2, ... drafts were accepted: {share_by_depth}"
        )
    data = [
        f"{source['name']} (sha256 {source['sha256'][:12]})" if source["sha256"] else source["name"]
        for source in facts["data"]
    ]
    versions, revision = facts["versions"], facts["revision"]
    used = ", ".join(f"{name} {version}" for name, version in versions.items() if version) + (
        f"; revision {revision[:12]}" if revision else ""
    )
    speed = result.tokens / max(result.seconds, 1e-9)
    header = ModelCardData(library_name="redrafter", base_model=base, tags=["redrafter", "speculative-decoding"])
    return f"""---
{header.to_yaml()}
---

# Recurrent drafter for {base}

It makes this base write faster and changes none of its tokens. It fits no other base; loading refuses one.

```python
from redrafter import ReDrafter

engine = ReDrafter.from_pretrained("{base}", "path/to/this/directory")
```

- Size: {describe_size(model, drafter)} (which was frozen).
- Trained for {drafter.config.trained_draft_len} draft steps: {result.steps} optimizer steps, {result.tokens:,} tokens \
in {result.seconds:.0f} s, {speed:,.0f} tokens/s on {facts["processes"]} x {facts["device"]}. {_describe_choice(result)}
- Measured: {measured}.
- Loss: {config.distill:g} x KL(base || drafter) + {1 - config.distill:g} x cross-entropy, each draft step weighing \
{config.decay:g} of the one before; {result.loss:.4f} at the end.
- Data: {", ".join(data) or "in memory"}; {facts["windows"]:,} windows. Seed {config.seed}.
- Made with {used}. training.json has every option, and what validation found on the way:

```
{facts["command"]}
```
"""


def _describe_choice(result: TrainingResult) -> str:
    """Say at which step the saved weights were taken."""
    if len(result.tokens_per_step) < 2:
        return "These are its last weights."
    return f"These are the weights of step {result.best_step}, the best of {len(result.tokens_per_step)} validations."
