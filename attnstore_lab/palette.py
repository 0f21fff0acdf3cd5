# SPDX-License-Identifier: Apache-2.0
"""The one palette: what tiers and systems look like in every picture, and how a figure begins.

All plotting code takes colours, names and figures from here; tests/unit/repository/test_palette.py
holds that. A picture has no ground of its own: pages are light or dark. So words and lines have
colours that are seen on both, and tints, which are not, carry dark words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

INK: Final = "#7a7a7a"
"""Words, axes and grids: on a light and on a dark page."""
ON_TINT: Final = "#1a1a1a"
"""Words on a tint."""
TINTS: Final = {
    "HBM": "#f2bd94",
    "DRAM": "#9ccbed",
    "NVMe": "#9bd8bd",
    "siblings": "#c3b4e4",
    "shared": "#e6d690",
    "computed": "#c8c8c8",
    "other": "#e4e4e4",
    "answer": "#f7ddc8",
}
"""Areas, by where KV is: those of docs/images/tiers.svg. What is no tier is grey."""
OURS: Final = "attnstore"
SYSTEMS: Final = {
    OURS: "#2f86c9",
    "vllm": "#878787",
    "re": "#a3704a",
    "bound": "#d2762f",
    "infinite": "#a88a00",
    "belady": "#b565a7",
    "dram": "#7d9130",
    "lru": "#d8608c",
    "lru-ahead": "#9b6bd0",
    "fifo": "#d9605a",
    "lmcache": "#1f9a96",
    "offloading": "#6f7fd8",
    "example": "#5f8fa3",
}
"""Lines and bars of systems and policies."""
SYSTEMS_AS: Final = {
    "recompute": "re",
    "attnstore-lru": "lru",
    "attnstore-fifo": "fifo",
    "moved": OURS,
    "old positions": "fifo",
}
"""Names of the same under another command; and two ways of reuse, which no picture has beside
policies."""
PAPER: Final = "paper"
NAMES: Final = {
    OURS: "AttnStore",
    "vllm": "vLLM's own cache",
    "re": "no cache",
    "recompute": "no store",
    "bound": "HBM for everything",
    "infinite": "unlimited cache",
    "belady": "Belady (sees the future)",
    "dram": "AttnStore, DRAM alone",
    "lru": "LRU",
    "lru-ahead": "LRU with look-ahead",
    "fifo": "FIFO",
    "lmcache": "LMCache",
    "offloading": "vLLM's offloading",
    "example": "vLLM's example connector",
    "s3fifo": "S3-FIFO",
    "arc": "ARC",
    "w-tinylfu": "W-TinyLFU",
    "lecar": "LeCaR",
    "second-use": "second use",
    "moved": "moved KV",
    "old positions": "KV at old positions",
    PAPER: "the paper's",
}
"""What a reader is told a system is. Others are called as their command calls them."""
OTHERS: Final = (
    "#2f86c9",
    "#d2762f",
    "#9b6bd0",
    "#1f9a96",
    "#d8608c",
    "#a88a00",
    "#6f7fd8",
    "#a3704a",
    "#7d9130",
    "#d9605a",
)
"""For what is neither tier nor system, in this order."""
MARKS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
"""With the colours, so that lines are told apart without them."""
FADED, BEHIND = 0.3, 0.55
"""Opacities: of a grid; of p95 and of single requests, behind a median."""
STYLE: Final = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.prop_cycle": f"cycler('color', {list(OTHERS)})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "grid.alpha": FADED,
    "grid.color": INK,
    "hatch.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "attnstore",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
"""Words stay words in an SVG, and the same figures make the same bytes."""


def color(system: str) -> str:
    """Of a system or policy; KeyError if it has none of its own."""
    return SYSTEMS[SYSTEMS_AS.get(system, system)]


def colors(systems: Any) -> dict[str, str]:
    """Of each: its own, or the first of OTHERS that no one here has."""
    names = list(dict.fromkeys(systems))
    own = {n: color(n) for n in names if SYSTEMS_AS.get(n, n) in SYSTEMS}
    free = [other for other in OTHERS if other not in own.values()]
    rest = [name for name in names if name not in own and name != PAPER]
    return own | {name: free[n % len(free)] for n, name in enumerate(rest)} | {PAPER: INK}


def name(system: str) -> str:
    """What a reader is told it is."""
    return NAMES.get(system) or NAMES.get(SYSTEMS_AS.get(system, system), system)


def figure(
    size: tuple[float, float], title: str, rows: int = 1, columns: int = 1, **more: Any
) -> tuple[Any, Any]:
    """A figure of matplotlib with that message above, and its axes in rows.

    It sets matplotlib's defaults for this process: a legend takes its colours when it is made.

    Args:
        size: inches.
        more: of Figure.subplots.
    Raises: ImportError without matplotlib.
    """
    import matplotlib  # noqa: PLC0415  a second to import, and not everywhere
    from matplotlib.figure import Figure  # noqa: PLC0415

    matplotlib.rcParams.update(STYLE)
    made = Figure(figsize=size)
    made.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return made, made.subplots(rows, columns, squeeze=False, **more)


def save(made: Any, path: Path) -> None:
    """Write it, without a ground and without a date. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_dated = path.suffix.lower() == ".svg"
    made.savefig(path, dpi=120, metadata={"Date": None} if is_dated else None)


def formats() -> list[str]:
    """Ends of files that matplotlib can write. Raises: ImportError without it."""
    from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415  a second to import

    return sorted(FigureCanvasBase.get_supported_filetypes())
