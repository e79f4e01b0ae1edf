"""Choose the tree of a trained drafter, and save it with its model card and a record that makes it reproducible."""

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from redrafter.app.flags import format_command, is_path, short_name
from redrafter.data.windows import Windows
from redrafter.drafting.drafter_config import MEASURED_NODES
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.text_drafters import TrainableDrafter
from redrafter.files.atomic_folder import write_folder
from redrafter.files.dtype_names import dtype_name
from redrafter.files.hub import CARD_FILE
from redrafter.formats.model_card import acceptance_section, make_header, make_introduction
from redrafter.measure.record import hardware, versions
from redrafter.measure.replay import ReplayStats, ValidationTexts
from redrafter.scheduler.sequence import Stats
from redrafter.train.config import RECORD_FILE, TrainConfig, check_output
from redrafter.train.loss import DECAY
from redrafter.train.progress import TrainingState
from redrafter.tree.sizes import TreeShape

WIDTHS = (3, 4, 5, 8)  # candidate widths for a trained drafter's default tree
# Trees within this fraction of the best count as equal: 32 texts of 64 tokens do not resolve smaller differences.
TIE = 0.01


def save_drafter(
    drafter: DrafterModel, output: Path, card: str, facts: dict[str, Any], dtype: torch.dtype, overwrite: bool = False
) -> None:
    """Write a copy of a drafter in a dtype, with its model card and its training record.

    `facts` is the result of `make_provenance`; `overwrite` replaces an existing drafter. Raises the errors of
    `write_folder` and `check_output`.
    """
    check_output(output, overwrite)
    # A copy: casting `drafter` itself would round the weights that training may continue with.
    saved: Any = copy.deepcopy(drafter).cpu()

    def fill(folder: Path) -> None:
        saved.to(dtype).save_pretrained(folder)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
        (folder / RECORD_FILE).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    # Written under another name and renamed, so that no reader sees part of a drafter.
    write_folder(output, fill)


def describe_size(model: PreTrainedModel, drafter: DrafterModel) -> str:
    """Describe a drafter's size, e.g. `164,224 parameters, 3.6 % of the base's 4,505,184`."""
    base, size = model.num_parameters(), drafter.num_parameters()
    return f"{size:,} parameters, {100 * size / base:.1f} % of the base's {base:,}"


def served_shape(drafter: DrafterModel) -> TreeShape:
    """Return the tree that a drafter is measured with: its config's beams and depth, and at most `MEASURED_NODES`."""
    beams, depth = drafter.config.draft_beams, drafter.config.draft_len_per_beam
    return TreeShape(beams, depth, min(MEASURED_NODES, 1 + beams * depth))


def make_model_card(
    model: PreTrainedModel,
    drafter: DrafterModel,
    config: TrainConfig,
    result: TrainingState,
    measured: Mapping[str, Stats],
    prompts: str,
    facts: dict[str, Any],
) -> str:
    """Compose the model card of a trained drafter: Markdown under a header in YAML, for README.md.

    `measured` has the last validation's result on each kind of texts, greedy ones first; it may be empty. `prompts`
    describes the number and the kind of its prompts. `facts` is the result of `make_provenance`.
    """
    base, tree = drafter.config.base_model or type(model).__name__, served_shape(drafter)
    said, acceptance = "not measured: there was nothing to validate on", ""
    if measured:
        greedy = next(iter(measured.values()))
        said = (
            f"{greedy.tokens_per_step:.2f} tokens per step, greedy, on texts that the base wrote from {prompts} "
            f"({tree.beams} beams x {tree.depth} tokens, {tree.node_budget} nodes)"
        )
        rows = (
            (name, x.tokens_per_step, [count / max(x.steps, 1) for count in x.accepted_by_depth])
            for name, x in measured.items()
        )
        acceptance = "\n" + acceptance_section(f"{tree.beams}x{tree.depth}, {tree.node_budget} nodes", rows)
    used = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    speed, validations = result.tokens / max(result.seconds, 1e-9), len(result.tokens_per_step)
    choice = "These are its last weights."
    if validations > 1:
        choice = f"These are the weights of step {result.best_step}, the best of {validations} validations."
    return f"""{make_header(drafter.config, base, str(config.model))}
{make_introduction(drafter.config, base)}
- Size: {describe_size(model, drafter)} (which was frozen).
- Trained for {drafter.config.trained_draft_len} draft steps: {result.step} optimizer steps, {result.tokens:,} tokens \
in {result.seconds:.0f} s, {speed:,.0f} tokens/s on {facts["processes"]} x {facts["device"]}. {choice}
- Measured: {said}.
- Loss: {config.distill:g} x KL(base || drafter) + {1 - config.distill:g} x cross-entropy, each draft step weighing \
{DECAY:g} of the one before; {result.loss:.4f} at the end.
- Data: {", ".join(facts["data"])}; {facts["windows"]:,} windows (sha256 {facts["data_hash"][:12]}). Seed {config.seed}.
- Made with {used}. training.json has every option, and what validation found on the way:

```
{facts["command"]}
```
{acceptance}"""


def make_provenance(
    model: PreTrainedModel,
    base: str,
    config: TrainConfig,
    result: TrainingState,
    windows: Windows,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Create the content of training.json."""
    best = result.best_step
    return {
        "command": format_command(["redrafter", "train"], config),
        "config": _config_without_folders(config),
        "versions": versions() | {"accelerate": version("accelerate")},
        "data": [short_name(source) for source in config.data],
        "data_hash": hash_windows(windows),
        "windows": len(windows),
        "base": base,
        "base_dtype": dtype_name(model.dtype),
        "mixed_precision": accelerator.mixed_precision,
        "device": hardware(accelerator.device),
        "processes": accelerator.num_processes,
        "steps": result.step,
        "saved_step": result.step if best is None else best,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(result.tokens / result.seconds, 1) if result.seconds > 0 else None,
        # JSON has no NaN.
        "loss": result.loss if math.isfinite(result.loss) else None,
        "accuracy": [part if math.isfinite(part) else None for part in result.accuracy],
        "tokens_per_step": {str(step): value for step, value in sorted(result.tokens_per_step.items())},
    }


def hash_windows(windows: Windows) -> str:
    """Return the sha256 of the windows, which changes with the data, their order, the tokenizer and the template."""
    digest = hashlib.sha256()
    # Offsets are included, since the same tokens may be split into other windows.
    for part in (windows.tokens, windows.mask, windows.offsets):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def _config_without_folders(config: TrainConfig) -> dict[str, object]:
    options = vars(config) | {"lr": config.peak_lr}
    for field in fields(config):
        value = options[field.name]
        if is_path(field):
            value = tuple(map(short_name, value)) if isinstance(value, tuple) else value and short_name(value)
        options[field.name] = value
    return options


def candidates(drafter: TrainableDrafter, draft_len: int) -> list[TreeShape]:
    """Return the trees to compare for a drafter that was trained for `draft_len` steps: up to twice as deep."""
    widths = [width for width in WIDTHS if width <= drafter.config.num_draft_ids]
    deepest = max(2 * draft_len, 2)
    deepest = min(deepest, drafter.config.max_draft_len or deepest)
    pairs = [(width, depth) for width in widths for depth in range(min(2, deepest), deepest + 1)]
    return [TreeShape(beams, depth, min(MEASURED_NODES, 1 + beams * depth)) for beams, depth in pairs]


def best_tree(tokens_per_step: Mapping[TreeShape, tuple[float, float]]) -> TreeShape:
    """Return the tree with the most tokens per step, averaged over greedy and temperature 1.

    Of equally good trees it is the shallowest, since the time of a draft grows with its depth.
    """
    mean = {shape: sum(pair) / 2 for shape, pair in tokens_per_step.items()}
    least = (1 - TIE) * max(mean.values())
    return min((shape for shape in mean if mean[shape] >= least), key=lambda shape: (shape.depth, -mean[shape]))


def choose_tree(
    drafter: TrainableDrafter, texts: ValidationTexts, draft_len: int, seed: int
) -> tuple[dict[str, ReplayStats], str]:
    """Set the search defaults in a drafter's config to the tree with the most tokens per step on validation texts.

    Widths and depths are compared at a fixed number of verified nodes, which determines the cost of the base's step.
    One search per width serves all depths, so the choice costs about one validation per width, plus the generation of
    the texts at temperature 1.

    Args:
        drafter: A drafter that was trained for `draft_len` steps.
        texts: Greedy texts of the base; texts at temperature 1 are generated here from the same prompts.
        draft_len: Number of draft steps that it was trained for.
        seed: Seed of the texts at temperature 1.

    Returns the statistics of the tree on texts of each temperature, greedy ones first, and a line about the choice.
    """
    shapes = candidates(drafter, draft_len)
    # A served drafter is used both ways, so neither alone decides on the tree.
    greedy, sampled = (texts.measure_all(drafter, shapes, written) for written in (texts.texts, texts.sampled(seed)))
    pairs = zip(greedy, sampled, strict=True)
    measured = {shape: (a.tokens_per_step, b.tokens_per_step) for shape, (a, b) in zip(shapes, pairs, strict=True)}
    chosen, config = best_tree(measured), drafter.config
    config.draft_beams, config.draft_len_per_beam = chosen.beams, chosen.depth
    at = {f"{shape.beams}x{shape.depth}": "{:.2f} greedily, {:.2f} at T=1".format(*measured[shape]) for shape in shapes}
    name, trained = f"{chosen.beams}x{chosen.depth}", f"5x{draft_len}"
    other = f"; {trained} {at[trained]}" if trained in at and trained != name else ""
    line = f"tree of {chosen.node_budget} nodes: {name} writes most, tokens per step {at[name]}{other}"
    index = shapes.index(chosen)
    return {"greedy": greedy[index], "temperature 1": sampled[index]}, line
