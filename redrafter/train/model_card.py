"""The model card that a trained drafter carries."""

from typing import Any

from transformers import PreTrainedModel

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.engine.outputs import Stats
from redrafter.train.config import TrainConfig
from redrafter.train.evaluate.shapes import Shape
from redrafter.train.loop import Report

__all__ = ["model_card", "shape", "sizes"]


def sizes(model: PreTrainedModel, drafter: RecurrentDrafter) -> str:
    base, own = model.num_parameters(), drafter.num_parameters()
    return f"{own:,} parameters, {100 * own / base:.1f} % of the base's {base:,}"


def shape(drafter: RecurrentDrafter) -> Shape:
    """What a drafter is measured with: its config's beams and depth, all nodes."""
    beams, depth = drafter.config.draft_beams, drafter.config.draft_len_per_beam
    return Shape(beams, depth, 1 + beams * depth)


def model_card(
    model: PreTrainedModel,
    drafter: RecurrentDrafter,
    config: TrainConfig,
    report: Report,
    walk: Stats | None,
    prompts: int,
    facts: dict[str, Any],
) -> str:
    """README.md of a drafter. walk: the validation over that many prompts, None when there was none. facts: as
    `provenance` gives them."""
    base = drafter.config.base_model or type(model).__name__
    tree = shape(drafter)
    measured = "not measured: there was nothing to validate on"
    if walk is not None:
        reached = ", ".join(f"{count / max(walk.steps, 1):.2f}" for count in walk.accepted_by_depth)
        measured = (
            f"{walk.tokens_per_step:.2f} tokens per step, greedy, on texts that the base wrote from {prompts} held-out "
            f"prompts ({tree.beams} beams x {tree.depth} tokens, {tree.nodes} nodes). Part of the steps in which at "
            f"least 1, 2, ... drafts were accepted: {reached}"
        )
    data = [
        f"{each['name']} (sha256 {each['sha256'][:12]})" if each["sha256"] else each["name"] for each in facts["data"]
    ]
    made, revision = facts["versions"], facts["revision"]
    used = ", ".join(f"{name} {of}" for name, of in made.items() if of) + (
        f"; revision {revision[:12]}" if revision else ""
    )
    speed = report.tokens / max(report.seconds, 1e-9)
    return f"""---
library_name: redrafter
base_model: {base}
tags:
- redrafter
- speculative-decoding
---

# Recurrent drafter for {base}

It makes this base write faster and changes none of its tokens. It fits no other base; loading refuses one.

```python
from redrafter import ReDrafter

engine = ReDrafter.from_pretrained("{base}", "path/to/this/directory")
```

- Size: {sizes(model, drafter)} (which was frozen).
- Trained for {drafter.config.trained_draft_len} draft steps: {report.steps} optimizer steps, {report.tokens:,} tokens \
in {report.seconds:.0f} s, {speed:,.0f} tokens/s on {facts["processes"]} x {facts["device"]}. {_chosen(report)}
- Measured: {measured}.
- Loss: {config.distill:g} x KL(base || drafter) + {1 - config.distill:g} x cross-entropy, each draft step weighing \
{config.decay:g} of the one before; {report.loss:.4f} at the end.
- Data: {", ".join(data) or "in memory"}; {facts["windows"]:,} windows. Seed {config.seed}.
- Made with {used}. training.json has every option, and what validation found on the way:

```
{facts["command"]}
```
"""


def _chosen(report: Report) -> str:
    if len(report.walked) < 2:
        return "These are its last weights."
    return f"These are the weights of step {report.best_step}, the best of {len(report.walked)} validations."
