"""Plot of an evaluation: acceptance by depth, for each temperature and shape of tree."""

from pathlib import Path
from typing import Any

from redrafter.files.atomic_file import write_figure

__all__ = ["plot"]


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw a PNG with a panel for each temperature and a line for each shape. Needs matplotlib.

    Args:
        document: Report that `make_report` made.
        path: File to write.

    Raises:
        ArgumentError: The file cannot be written; nothing is left behind.
    """
    from matplotlib.figure import Figure  # without pyplot, which wants a screen

    measured = document["temperatures"]
    figure = Figure(figsize=(1 + 6 * len(measured), 5), layout="constrained")
    panels: Any = figure.subplots(1, len(measured), sharey=True, squeeze=False)
    for axes, result in zip(panels[0], measured, strict=True):
        for tree in result["trees"]:
            rates = tree["all_steps"]["acceptance"]
            points = [(depth, rate) for depth, rate in enumerate(rates, 1) if rate is not None]
            style = "o--" if tree["nodes"] is None else "o-"
            tokens_per_step = tree["all_steps"]["tokens_per_step"]
            label = (
                tree["tree"] if tokens_per_step is None else f"{tree['tree']}: {tokens_per_step:.2f} tokens per step"
            )
            axes.plot([depth for depth, _ in points], [rate for _, rate in points], style, markersize=4, label=label)
        axes.set_title(
            "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}", fontsize=10
        )
        axes.set_xticks(range(1, max(tree["depth"] for tree in result["trees"]) + 1))
        axes.set_xlabel("depth of the draft")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    panels[0][0].set_ylabel("share accepted, of those whose parent was")
    pair = f"{document['model']}, drafter {document['drafter']}"
    figure.supxlabel(f"{pair}, {document['dtype']}, {document['hardware']}", fontsize=7)
    write_figure(path, figure)
