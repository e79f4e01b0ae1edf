"""The picture of `redrafter tune`: how much faster than plain decoding each tree is, by batch size."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redrafter.bench.tree_choice import Timing, describe
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.files.atomic_file import write_figure
from redrafter.measure.picture import batch_size_axis

__all__ = ["plot"]

OTHER_COLOR, CHOSEN_COLOR = "#b0b0b0", "#1f77b4"


def plot(timings: Sequence[Timing], shapes: dict[int, TreeShape | None], title: str, path: str | Path) -> None:
    """Draw the speed of every tree in grey, and over them the tree chosen for each batch size.

    Args:
        timings: What was measured, plain decoding at every batch size included.
        shapes: The tree chosen by batch size; None for plain decoding.
        title: Text above the picture.
        path: The `.png` file to write.
    """
    from matplotlib.figure import Figure  # without pyplot, which asks for a window system

    plain = {timing.batch: timing.tokens_per_second for timing in timings if timing.shape is None}
    ratio = {(timing.shape, timing.batch): timing.tokens_per_second / plain[timing.batch] for timing in timings}
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.add_subplot()
    lines: dict[TreeShape, list[tuple[int, float]]] = {}
    for (shape, batch), value in sorted(ratio.items(), key=lambda item: item[0][1]):
        if shape is not None:
            lines.setdefault(_of_a_row(shape, batch), []).append((batch, value))
    for points in lines.values():
        axes.plot(*zip(*points, strict=True), color=OTHER_COLOR, linewidth=0.8, marker=".", zorder=1)
    sizes = sorted(shapes)
    axes.plot(sizes, [ratio[shapes[n], n] for n in sizes], color=CHOSEN_COLOR, marker="o", linewidth=2, label="chosen")
    for size in sizes:
        style = {"textcoords": "offset points", "xytext": (0, 8), "ha": "center", "fontsize": 8}
        axes.annotate(
            describe(shapes[size]).replace(", ", "\n"), (size, ratio[shapes[size], size]), color=CHOSEN_COLOR, **style
        )
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="plain decoding")
    axes.plot([], [], color=OTHER_COLOR, marker=".", linewidth=0.8, label="other trees")
    batch_size_axis(axes, sorted(plain))
    axes.set_ylim(0, 1.15 * max(ratio.values()))
    axes.margins(x=0.1)
    axes.set_ylabel("tokens per second, times plain decoding's")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower left", frameon=False)
    write_figure(Path(path), figure)


def _of_a_row(shape: TreeShape, batch: int) -> TreeShape:
    """Return the shape with the nodes that are shared counted for each row, which are equally many at all sizes."""
    return shape if shape.shared_nodes is None else replace(shape, shared_nodes=shape.shared_nodes // batch)
