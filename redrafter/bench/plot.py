"""The report as pictures. Needs matplotlib, which only this needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import write_figure
from redrafter.measure.picture import check_matplotlib

__all__ = ["check_plots", "draw"]

PLAIN, FAST, FLOOR = "#7f7f7f", "#1f77b4", "#d62728"


def check_plots(directory: Path) -> None:
    """Refuse what cannot be drawn or written before anything is measured."""
    check_matplotlib("--plots")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--plots {directory} cannot be a directory: {error.strerror or error}") from error


def draw(document: dict[str, Any], directory: Path) -> list[Path]:
    """One PNG for each picture that there is data for; their paths."""
    pictures: dict[str, tuple[str, Callable[[Any, dict[str, Any]], None]]] = {}
    if document.get("batches"):
        pictures |= {
            "throughput": ("tokens per second", _throughput),
            "ratio": ("speculative over plain", _ratio),
            "acceptance": ("share of steps that accept at least so many drafts", _acceptance),
        }
    if document.get("parts"):
        pictures["step"] = ("one step in ms; red lines: bytes over copy bandwidth", _step)
    return [_picture(document, directory / f"{name}.png", *each) for name, each in pictures.items()]


def _picture(document: dict[str, Any], path: Path, title: str, fill: Callable[[Any, dict[str, Any]], None]) -> Path:
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    fill(axes, document)
    figure.set_figwidth(max(8.0, 0.7 * len(axes.get_xticks())) if fill is _step else 8.0)
    axes.set_title(title)
    what = f"{document['model']}, {document['dtype']}, {document['hardware']}"
    figure.supxlabel("\n".join(filter(None, [what, document.get("padded")])), fontsize=7)
    write_figure(path, figure)
    return path


def _sizes(axes: Any, document: dict[str, Any]) -> list[int]:
    sizes = [one["batch_size"] for one in document["batches"]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_xlabel("rows in a batch")
    axes.grid(alpha=0.3)
    return sizes


def _throughput(axes: Any, document: dict[str, Any]) -> None:
    sizes = _sizes(axes, document)
    for way, color in (("plain", PLAIN), ("speculative", FAST)):
        speeds = [one[way]["tokens_per_second"] for one in document["batches"]]
        axes.plot(sizes, speeds, "o-", color=color, label=way)
    axes.set_ylim(bottom=0)
    axes.legend()


def _ratio(axes: Any, document: dict[str, Any]) -> None:
    ratios = [one["speedup"] for one in document["batches"]]
    axes.plot(_sizes(axes, document), ratios, "o-", color=FAST)
    axes.axhline(1.0, color=PLAIN, linestyle="--")
    axes.set_ylim(bottom=0)


def _acceptance(axes: Any, document: dict[str, Any]) -> None:
    for one in document["batches"]:
        shares = one["accepted_by_depth"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=f"batch {one['batch_size']}")
    axes.set_xlabel("drafts")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def _step(axes: Any, document: dict[str, Any]) -> None:
    names = []
    for place, one in enumerate(document["parts"]):
        names.append(f"{'speculative' if one['speculative'] else 'plain'}\n{one['batch_size']} x {one['context']}")
        bottom = 0.0
        for part, color in (("draft", "#9ecae1"), ("verify", FAST), ("rest", "#c7c7c7")):
            height = max(one[f"{part}_ms"] or 0.0, 0.0)
            axes.bar(place, height, bottom=bottom, color=color, label=part if place == 0 else None)
            bottom += height
        floor = (one["draft_floor_ms"] or 0.0) + one["verify_floor_ms"]
        axes.hlines(floor, place - 0.4, place + 0.4, color=FLOOR)
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("rows x committed tokens")
    axes.set_ylabel("ms")
    axes.legend()
