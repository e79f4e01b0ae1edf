"""Plot of an evaluation: acceptance by depth, for each temperature, length of prompts and shape of tree."""

from pathlib import Path
from typing import Any

from redrafter.files.atomic_file import write_figure

__all__ = ["plot"]


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw a PNG with a line for each shape, in a column for each temperature and a row for each length of prompts.

    Needs matplotlib.

    Args:
        document: Report that `make_report` made.
        path: File to write.

    Raises:
        ArgumentError: The file cannot be written; nothing is left behind.
    """
    from matplotlib.figure import Figure  # without pyplot, which wants a screen

    measured, rows = document["temperatures"], len(document["prompts"]["lengths"]) or 1
    columns = len(measured) // rows
    figure = Figure(figsize=(1 + 6 * columns, 5 * rows), layout="constrained")
    panels: Any = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, result in zip(panels.T.flat, measured, strict=True):
        _draw(axes, result)
    for axes in panels[:, 0]:
        axes.set_ylabel("share accepted, of those whose parent was")
    pair = f"{document['model']}, drafter {document['drafter']}"
    figure.supxlabel(f"{pair}, {document['dtype']}, {document['hardware']}", fontsize=7)
    write_figure(path, figure)


def _draw(axes: Any, result: dict[str, Any]) -> None:
    """Draw the lines of one temperature and one length of prompts on a panel."""
    for tree in result["trees"]:
        rates = tree["all_steps"]["acceptance"]
        points = [(depth, rate) for depth, rate in enumerate(rates, 1) if rate is not None]
        style = "o--" if tree["nodes"] is None else "o-"
        tokens_per_step = tree["all_steps"]["tokens_per_step"]
        label = tree["tree"] if tokens_per_step is None else f"{tree['tree']}: {tokens_per_step:.2f} tokens per step"
        axes.plot([depth for depth, _ in points], [rate for _, rate in points], style, markersize=4, label=label)
    title = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}"
    length = result["prompt_length"]
    axes.set_title(title if length is None else f"{title}, prompts of {length} tokens", fontsize=10)
    axes.set_xticks(range(1, max(tree["depth"] for tree in result["trees"]) + 1))
    axes.set_xlabel("depth of the draft")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
