"""The picture of an evaluation: how often each further draft is accepted, by temperature and shape of tree."""

from pathlib import Path
from typing import Any

from redrafter.files.atomic_file import write_figure

__all__ = ["plot"]


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw a PNG: one panel for each temperature, one line for each shape. Needs matplotlib. Raises `ArgumentError`
    when it cannot be written, and leaves nothing behind then."""
    from matplotlib.figure import Figure  # without pyplot, which wants a screen

    measured = document["temperatures"]
    figure = Figure(figsize=(1 + 6 * len(measured), 5), layout="constrained")
    panels: Any = figure.subplots(1, len(measured), sharey=True, squeeze=False)
    for axes, one in zip(panels[0], measured, strict=True):
        for tree in one["trees"]:
            rates = tree["all_steps"]["acceptance"]
            known = [(depth, rate) for depth, rate in enumerate(rates, 1) if rate is not None]
            style = "o--" if tree["nodes"] is None else "o-"
            worth = tree["all_steps"]["tokens_per_step"]
            label = tree["tree"] if worth is None else f"{tree['tree']}: {worth:.2f} tokens per step"
            axes.plot([depth for depth, _ in known], [rate for _, rate in known], style, markersize=4, label=label)
        axes.set_title("greedy" if one["temperature"] == 0 else f"temperature {one['temperature']:g}", fontsize=10)
        axes.set_xticks(range(1, max(tree["depth"] for tree in one["trees"]) + 1))
        axes.set_xlabel("depth of the draft")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    panels[0][0].set_ylabel("share accepted, of those whose parent was")
    pair = f"{document['model']}, drafter {document['drafter']}"
    figure.supxlabel(f"{pair}, {document['dtype']}, {document['hardware']}", fontsize=7)
    write_figure(path, figure)
