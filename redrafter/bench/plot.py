"""The pictures of `redrafter bench`, drawn from its JSON document with matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redrafter.files.atomic_file import write_figure
from redrafter.measure.picture import batch_size_axis

__all__ = ["draw"]

PLAIN_COLOR, SPECULATIVE_COLOR, FLOOR_COLOR = "#7f7f7f", "#1f77b4", "#d62728"
PART_COLORS = {"draft": "#9ecae1", "verify": SPECULATIVE_COLOR, "rest": "#c7c7c7"}

Fill = Callable[[Any, dict[str, Any]], None]  # draws a document on matplotlib axes


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw every picture that the document has data for.

    Args:
        document: What `redrafter bench` wrote.
        folder: The folder for the pictures, which must exist.

    Returns:
        The paths of the `.png` files.
    """
    pictures: dict[str, tuple[str, Fill]] = {}
    if document.get("batches"):
        pictures |= {
            "throughput": ("tokens per second", _fill_throughput),
            "ratio": ("tokens per second, times plain decoding's", _fill_ratio),
            "acceptance": ("share of steps that accept at least so many drafts", _fill_acceptance),
        }
    if document.get("parts"):
        pictures["step"] = ("one step in ms; red lines: bytes over copy bandwidth", _fill_step)
    return [_picture(document, folder / f"{name}.png", title, fill) for name, (title, fill) in pictures.items()]


def _picture(document: dict[str, Any], path: Path, title: str, fill: Fill) -> Path:
    """Write one picture, with what was measured below it, and return its path."""
    from matplotlib.figure import Figure  # without pyplot, which asks for a window system

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    fill(axes, document)
    if fill is _fill_step:
        figure.set_figwidth(max(8.0, 0.7 * len(document["parts"])))
    axes.set_title(title)
    conditions = f"{document['model']}, {document['dtype']}, {document['hardware']}"
    figure.supxlabel("\n".join(filter(None, [conditions, document.get("padded")])), fontsize=7)
    write_figure(path, figure)
    return path


def _batch_sizes(axes: Any, document: dict[str, Any]) -> list[int]:
    """Return the batch sizes measured, after making them the x-axis."""
    sizes = [batch["batch_size"] for batch in document["batches"]]
    batch_size_axis(axes, sizes)
    axes.grid(alpha=0.3)
    return sizes


def _fill_throughput(axes: Any, document: dict[str, Any]) -> None:
    sizes = _batch_sizes(axes, document)
    for way, color in (("plain", PLAIN_COLOR), ("speculative", SPECULATIVE_COLOR)):
        speeds = [batch[way]["tokens_per_second"] for batch in document["batches"]]
        axes.plot(sizes, speeds, "o-", color=color, label=way)
    axes.set_ylim(bottom=0)
    axes.legend()


def _fill_ratio(axes: Any, document: dict[str, Any]) -> None:
    sizes, ratios = _batch_sizes(axes, document), [batch["speedup"] for batch in document["batches"]]
    axes.plot(sizes, ratios, "o-", color=SPECULATIVE_COLOR, label="with the drafter")
    _write_values(axes, sizes, ratios)
    axes.axhline(1.0, color=PLAIN_COLOR, linestyle="--", label="plain decoding")
    axes.set_ylim(0, 1.15 * max(1.0, *ratios))
    axes.margins(x=0.08)
    axes.legend(loc="lower left", frameon=False)


def _write_values(axes: Any, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Write each point's y above it, with two decimals."""
    for x, y in zip(xs, ys, strict=True):
        axes.annotate(f"{y:.2f}", (x, y), textcoords="offset points", xytext=(0, 8), ha="center")


def _fill_acceptance(axes: Any, document: dict[str, Any]) -> None:
    for batch in document["batches"]:
        shares = batch["accepted_by_depth"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=f"batch {batch['batch_size']}")
    axes.set_xlabel("drafts")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def _fill_step(axes: Any, document: dict[str, Any]) -> None:
    names = []
    for x, step in enumerate(document["parts"]):
        names.append(f"{'speculative' if step['speculative'] else 'plain'}\n{step['batch_size']} x {step['context']}")
        bottom = 0.0
        for part, color in PART_COLORS.items():
            height = max(step[f"{part}_ms"] or 0.0, 0.0)
            axes.bar(x, height, bottom=bottom, color=color, label=part if x == 0 else None)
            bottom += height
        floor = (step["draft_floor_ms"] or 0.0) + step["verify_floor_ms"]
        axes.hlines(floor, x - 0.4, x + 0.4, color=FLOOR_COLOR)
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("rows x committed tokens")
    axes.set_ylabel("ms")
    axes.legend()
