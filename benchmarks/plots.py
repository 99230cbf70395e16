"""Rates of decoding as pictures, from records, beside others' figures (peers.json).

    python benchmarks/plots.py RECORDS... --out DIR [--format svg] [--format png] [--no-peers]

For each shape in the records: tok/s against the context, and tok/s of all rows against their number. RECORDS are files
of benchmarks/decode.py, of `mlxcel bench-engine --out`, and of benchmarks/engine_bench_rounds.py. Each line says how it
was taken; bars are the range of rounds or repeats. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from plot_points import Kind, Line, Point, Points, peer_points, read_points

TITLES: Mapping[Kind, str] = {"context": "one row, by its context", "batch": "all rows together, by their number"}
AXES: Mapping[Kind, str] = {"context": "context (tokens)", "batch": "batch (rows)"}
OURS = ("#0b5cad", "#00877a", "#7b3fa0", "#b3420a", "#3d6b1f", "#a11450")
THEIRS = ("#8c6d1f", "#c2452d", "#6b6b6b", "#a06bb0", "#2f8fa8", "#b08a6a", "#7d8f3c", "#c47a9a")
MARKERS_OF_OURS, MARKERS_OF_THEIRS = "osD^v", "x+12*"
LEGEND_WIDTH = 88
"""Letters of a line."""
LEGEND_COLUMNS = 2
LINE_INCHES, AXES_INCHES = 0.135, 4.8
"""Of a line of the legend, which stands below the axes, and of these."""
APART = 1.1
"""Times that a tick is more than the one before it, at least: else their words meet."""


def figure(shape: str, kind: Kind, points: Points, others: Sequence[str] = ()) -> Figure:
    """Lines of one shape. Ours are broad, others' are thin, what is arithmetic is broken. A name keeps its colour in
    all pictures: `others` are those of all of them, in order."""
    told = sum(len(label(line).splitlines()) + 0.6 for line in points)
    size = (11, AXES_INCHES + LINE_INCHES * told / LEGEND_COLUMNS)
    picture = Figure(figsize=size, facecolor="white", layout="constrained")
    axes = picture.add_subplot(facecolor="white")
    ours = [line for line in points if line.own]
    for line in sorted(points, key=lambda line: (not line.own, not line.bound)):
        if line.bound:
            style: dict[str, Any] = {"color": "#444444", "linestyle": "--", "linewidth": 1.2}
        elif line.own:
            place = ours.index(line)
            style = {"color": OURS[place % len(OURS)], "marker": MARKERS_OF_OURS[place % 5], "linewidth": 2.2}
        else:
            place = others.index(line.name)
            style = {"color": THEIRS[place % len(THEIRS)], "marker": MARKERS_OF_THEIRS[place % 5], "linewidth": 1}
        _draw(axes, line, points[line], {**style, "zorder": 3 if line.own else 2})
    ticks = apart(sorted({point.x for values in points.values() for point in values}))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45 if len(ticks) > 8 else 0)
    axes.minorticks_off()
    if kind == "batch":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_formatter("")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(AXES[kind])
    axes.set_ylabel("decode rate (tok/s)")
    axes.set_title(f"{shape}: {TITLES[kind]}", loc="left")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend(loc="outside lower left", ncols=LEGEND_COLUMNS, fontsize=7.5, frameon=False, labelspacing=0.6)
    return picture


def apart(values: Sequence[float]) -> list[float]:
    """Those of ascending values that are not about the one kept before."""
    kept: list[float] = []
    for value in values:
        if not kept or value >= kept[-1] * APART:
            kept.append(value)
    return kept


def label(line: Line) -> str:
    return textwrap.fill(f"{line.name} ({line.how})", LEGEND_WIDTH)


def draw(points: Points, folder: Path, formats: Sequence[str]) -> list[Path]:
    """A file each shape, kind and format; the same points give the same bytes of SVG."""
    written = []
    others = list(dict.fromkeys(line.name for line in points if not line.own and not line.bound))
    for shape, kind in dict.fromkeys((line.shape, line.kind) for line in points if line.own):
        chosen = {
            line: values
            for line, values in points.items()
            if (line.shape, line.kind) == (shape, kind) and not (kind == "batch" and _of_one_row(values))
        }
        if not any(line.own for line in chosen):
            continue
        with mpl.rc_context({"svg.hashsalt": "mlxcel", "svg.fonttype": "none"}):
            picture = figure(shape, kind, chosen, others)
            for name in formats:
                file = folder / f"{shape}-{kind}.{name}"
                picture.savefig(file, dpi=160, metadata={"Date": None} if name == "svg" else {})
                written.append(file)
    return written


def _of_one_row(values: Sequence[Point]) -> bool:
    """It is in the picture of contexts."""
    return all(point.x == 1 for point in values)


def _draw(axes: Any, line: Line, values: Sequence[Point], style: Mapping[str, Any]) -> None:
    x, rates = [point.x for point in values], [point.rate for point in values]
    below = [point.rate - point.low for point in values]
    above = [point.high - point.rate for point in values]
    errors = (below, above) if any(below + above) else None
    axes.errorbar(x, rates, yerr=errors, label=label(line), capsize=2, elinewidth=1, markersize=6, **style)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--format", action="append", choices=("svg", "png"), help="both unless named")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="others' figures")
    given = parser.parse_args()
    try:
        points = {**(peer_points() if given.peers else {}), **read_points(given.records)}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    given.out.mkdir(parents=True, exist_ok=True)
    for file in draw(points, given.out, given.format or ("svg", "png")):
        print(file)


if __name__ == "__main__":
    main()
