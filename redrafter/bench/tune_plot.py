"""The picture of a tuning: how much faster than plain decoding each tree is, by batch size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redrafter.bench.tune import Timing
from redrafter.checkpoints.loading import TreeShape
from redrafter.files.atomic_file import write_figure

__all__ = ["plot"]

GREY, BLUE = "#b0b0b0", "#1f77b4"


def plot(timings: Sequence[Timing], shapes: dict[int, TreeShape | None], title: str, path: str | Path) -> None:
    """Draw every tree in grey, and over them what was chosen."""
    from matplotlib.figure import Figure  # without pyplot, which wants a screen

    plain = {timing.batch: timing.tokens_per_second for timing in timings if timing.shape is None}
    ratio = {(each.shape, each.batch): each.tokens_per_second / plain[each.batch] for each in timings}
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.add_subplot()
    for shape in dict.fromkeys(timing.shape for timing in timings if timing.shape is not None):
        points = sorted((batch, value) for (other, batch), value in ratio.items() if other == shape)
        axes.plot(*zip(*points, strict=True), color=GREY, linewidth=0.8, marker=".", zorder=1)
    sizes = sorted(shapes)
    axes.plot(sizes, [ratio[shapes[n], n] for n in sizes], color=BLUE, marker="o", linewidth=2, label="chosen")
    for size in sizes:
        place = {"textcoords": "offset points", "xytext": (0, 8), "ha": "center", "fontsize": 8}
        axes.annotate(_label(shapes[size]), (size, ratio[shapes[size], size]), color=BLUE, **place)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="plain decoding")
    axes.plot([], [], color=GREY, marker=".", linewidth=0.8, label="other trees")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(plain), [str(n) for n in sorted(plain)])
    axes.set_ylim(0, 1.15 * max(ratio.values()))
    axes.margins(x=0.1)
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second, times plain decoding's")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower left", frameon=False)
    write_figure(Path(path), figure)


def _label(shape: TreeShape | None) -> str:
    if shape is None:
        return "off"
    return f"{shape.num_beams} x {shape.draft_len_per_beam}\n{shape.node_budget} nodes"
