"""Draw the figures of `redrafter bench`, from its JSON document."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redrafter.measure.report import drawing

GREY, LIGHT_GREY, BLUE, LIGHT_BLUE, RED = "#7f7f7f", "#b0b0b0", "#1f77b4", "#9ecae1", "#d62728"
PART_COLORS = {"draft": LIGHT_BLUE, "verify": BLUE, "rest": LIGHT_GREY}
ABOVE = {"textcoords": "offset points", "xytext": (0, 8), "ha": "center", "fontsize": 8}


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw all figures that a document of `redrafter bench` has data for into a folder; return their paths."""
    conditions = f"{document['model']}, {document['dtype']}, {document['hardware']}"
    conditions = "\n".join(filter(None, [conditions, document.get("padded")]))
    paths: list[Path] = []

    @contextmanager
    def picture(name: str, title: str, width: float = 8.0) -> Iterator[Any]:
        paths.append(folder / f"{name}.png")
        with drawing(paths[-1], conditions, (width, 5)) as axes:
            axes.set_title(title)
            yield axes

    if batches := document.get("batches"):
        sizes = [batch["batch_size"] for batch in batches]
        with picture("throughput", "tokens per second") as axes:
            for way, color in (("plain", GREY), ("speculative", BLUE)):
                speeds = [batch[way]["tokens_per_second"] for batch in batches]
                axes.plot(sizes, speeds, "o-", color=color, label=way)
            _batch_size_axis(axes, sizes)
            axes.set_ylim(bottom=0)
            axes.legend()
        with picture("ratio", "tokens per second, times plain decoding's") as axes:
            ratios = [batch["speedup"] for batch in batches]
            axes.plot(sizes, ratios, "o-", color=BLUE, label="with the drafter")
            for size, ratio in zip(sizes, ratios, strict=True):
                axes.annotate(f"{ratio:.2f}", (size, ratio), **ABOVE)
            _finish_ratios(axes, sizes, ratios)
        with picture("acceptance", "share of steps that accept at least this many drafts") as axes:
            for batch in batches:
                if shares := batch["accepted_by_depth"]:
                    axes.plot(range(1, len(shares) + 1), shares, "o-", label=f"batch {batch['batch_size']}")
            axes.set_xlabel("drafts")
            axes.set_ylim(0, 1)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
    if parts := document.get("parts"):
        title = "one step in ms; red lines: bytes over copy bandwidth"
        with picture("step", title, max(8.0, 0.7 * len(parts))) as axes:
            _draw_steps(axes, parts)
    return paths


def _draw_steps(axes: Any, steps: Sequence[dict[str, Any]]) -> None:
    names = []
    for x, step in enumerate(steps):
        names.append(f"{'speculative' if step['speculative'] else 'plain'}\n{step['batch_size']} x {step['context']}")
        bottom = 0.0
        for part, color in PART_COLORS.items():
            # The rest is a difference of measurements and may be slightly negative.
            height = max(step[f"{part}_ms"] or 0.0, 0.0)
            axes.bar(x, height, bottom=bottom, color=color, label=part if x == 0 else None)
            bottom += height
        axes.hlines((step["draft_floor_ms"] or 0.0) + step["verify_floor_ms"], x - 0.4, x + 0.4, color=RED)
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("rows x committed tokens")
    axes.set_ylabel("ms")
    axes.legend()


def _batch_size_axis(axes: Any, batch_sizes: Sequence[int]) -> None:
    """Make the x-axis logarithmic, with a tick at each batch size measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
    axes.minorticks_off()
    axes.set_xlabel("rows in a batch")
    axes.grid(alpha=0.3)


def _finish_ratios(axes: Any, sizes: Sequence[int], ratios: Sequence[float]) -> None:
    _batch_size_axis(axes, sizes)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle="--", label="plain decoding")
    axes.set_ylim(0, 1.15 * max(1.0, *ratios))
    axes.margins(x=0.1)
    axes.legend(loc="lower left", frameon=False)
