"""Save a trained drafter with its model card and a record of its training that makes it reproducible."""

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
from redrafter.files.atomic_folder import write_folder
from redrafter.files.dtype_names import dtype_name
from redrafter.files.hub import CARD_FILE
from redrafter.formats.model_card import acceptance_section, make_header, make_introduction
from redrafter.measure.record import hardware, versions
from redrafter.scheduler.sequence import Stats
from redrafter.train.config import TrainConfig
from redrafter.train.loss import DECAY
from redrafter.train.output_folder import RECORD_FILE, check_output
from redrafter.train.progress import TrainingState
from redrafter.tree.sizes import TreeShape


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
