"""The model card that a trained drafter carries."""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedModel

from redrafter.drafter import RecurrentDrafter
from redrafter.outputs import Stats
from redrafter.train.config import TrainConfig, shown_command
from redrafter.version import __version__

__all__ = ["Report", "model_card", "shape", "sizes"]


@dataclass(frozen=True)
class Report:
    """What a training did. loss, accuracy: of the last lines of progress; accuracy[k] is of step k + 1, among rollouts
    whose earlier steps were all right."""

    steps: int
    tokens: int
    seconds: float
    loss: float
    accuracy: list[float]


def sizes(model: PreTrainedModel, drafter: RecurrentDrafter) -> str:
    base, own = (sum(weight.numel() for weight in module.parameters()) for module in (model, drafter))
    return f"{own:,} parameters, {100 * own / base:.1f} % of the base's {base:,}"


def shape(drafter: RecurrentDrafter) -> tuple[int, int, int]:
    """The beams, depth and nodes that a drafter is measured with: its config's, all nodes."""
    beams, depth = drafter.config.draft_beams, drafter.config.draft_len_per_beam
    return beams, depth, 1 + beams * depth


def model_card(
    model: PreTrainedModel,
    drafter: RecurrentDrafter,
    config: TrainConfig,
    report: Report,
    walk: Stats | None,
    prompts: int,
) -> str:
    """README.md of a drafter. walk: the validation over that many prompts, None when there was none."""
    base = drafter.config.base_model or type(model).__name__
    beams, depth, nodes = shape(drafter)
    measured = "not measured: there was nothing to validate on"
    if walk is not None:
        reached = ", ".join(f"{count / max(walk.steps, 1):.2f}" for count in walk.accepted_by_depth)
        measured = (
            f"{walk.tokens_per_step:.2f} tokens per step, greedy, on texts that the base wrote from {prompts} held-out "
            f"prompts ({beams} beams x {depth} tokens, {nodes} nodes). Part of the steps in which at least 1, 2, ... "
            f"drafts were accepted: {reached}"
        )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
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
in {report.seconds:.0f} s.
- Measured: {measured}.
- Loss: {config.distill:g} x KL(base || drafter) + {1 - config.distill:g} x cross-entropy, each draft step weighing \
{config.decay:g} of the one before; {report.loss:.4f} at the end.
- Data: {", ".join(Path(file).name for file in config.data) or "in memory"}. Seed {config.seed}.
- Made with redrafter {__version__}, {packages}, Python {platform.python_version()}:

```
{shown_command(config)}
```
"""
