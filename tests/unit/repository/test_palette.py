# SPDX-License-Identifier: Apache-2.0
"""Every picture is made by attnstore_lab/palette.py, is what its file says, and can be read."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.colors import BASE_COLORS, CSS4_COLORS, TABLEAU_COLORS
from matplotlib.text import Text

from attnstore_lab import palette
from benchmarks import hero
from benchmarks.experiments.picture import title
from benchmarks.experiments.spec import read_all
from benchmarks.pictures import pictures

ROOT = Path(__file__).parents[3]
PALETTE = ROOT / "attnstore_lab" / "palette.py"
CODE = sorted(
    path
    for folder in ("attnstore_lab", "benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if path != PALETTE
)
BY_HAND = {f"docs/images/{name}.svg" for name in ("tiers", "turn", "truncation")}
MADE = pictures()
COMMITTED = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("docs", "results")
    for path in (ROOT / folder).rglob("*.svg")
)
HEX = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b")
CYCLE = re.compile(r"C\d")
NAMED = {*CSS4_COLORS, *TABLEAU_COLORS}
TAKES_COLOR = re.compile(r"^(c|.*color|colors|fill|stroke|fc|ec|mfc|mec)$")
PAGES = {"light": "#ffffff", "GitHub, dark": "#0d1117", "the site, dark": "#1e2129"}
LINE_CONTRAST, WORD_CONTRAST, TINT_CONTRAST = 3.0, 3.7, 7.0
"""Of lines and large words WCAG asks 3; no one grey has 4.5 on white and on the site's dark."""


def faults(source: str) -> Iterator[str]:
    """What plotting code has of its own: colours, matplotlib, files."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if HEX.search(node.value) or CYCLE.fullmatch(node.value) or node.value in NAMED:
                yield f"line {node.lineno}: the colour {node.value!r}"
        elif isinstance(node, ast.keyword) and TAKES_COLOR.match(node.arg or ""):
            given = node.value.value if isinstance(node.value, ast.Constant) else None
            if given in BASE_COLORS:
                yield f"line {node.value.lineno}: the colour {given!r}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            if any(module.partition(".")[0] == "matplotlib" for module in modules):
                yield f"line {node.lineno}: matplotlib; take palette.figure()"
        elif isinstance(node, ast.Attribute) and node.attr == "savefig":
            yield f"line {node.lineno}: savefig; take palette.save()"


def is_plotting(source: str) -> bool:
    return bool(re.search(r"\bpalette\b|import matplotlib|from matplotlib|<svg", source))


def test_plotting_code_takes_all_from_the_palette() -> None:
    plotting = {
        path.relative_to(ROOT).as_posix(): text
        for path in CODE
        if is_plotting(text := path.read_text(encoding="utf-8"))
    }
    assert len(plotting) >= 9
    found = [f"{path}: {fault}" for path, text in plotting.items() for fault in faults(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        'COLORS = {"vllm": "#b0413e"}',
        'axes.plot(x, y, color="C1")',
        'axes.axhline(1, color="black")',
        'axes.bar(x, y, color="tab:blue")',
        'axes.plot(x, y, c="r")',
        'drawn = f\'<rect fill="#fff" width="{width}"/>\'',
        "from matplotlib.figure import Figure",
        "import matplotlib.pyplot as plt",
        "figure.savefig(path, dpi=120)",
    ],
)
def test_a_planted_fault_is_found(planted: str) -> None:
    assert list(faults(planted))


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_words_and_lines_are_seen_on_every_page(page: str) -> None:
    assert contrast(palette.INK, page) >= WORD_CONTRAST
    for color in (*palette.SYSTEMS.values(), *palette.OTHERS):
        assert contrast(color, page) >= LINE_CONTRAST, color


def test_words_are_seen_on_every_tint() -> None:
    for name, tint in palette.TINTS.items():
        assert contrast(palette.ON_TINT, tint) >= TINT_CONTRAST, name


def test_each_system_has_one_colour_and_a_name() -> None:
    assert len(set(palette.SYSTEMS.values())) == len(palette.SYSTEMS)
    assert set(palette.SYSTEMS) <= set(palette.NAMES)
    assert palette.color("recompute") == palette.color("re")
    assert palette.colors(["moved", "attnstore"])["attnstore"] == palette.color("attnstore")
    many = palette.colors(["attnstore", "a", "b", "c"])
    assert len(set(many.values())) == len(many)


def test_every_picture_of_the_repository_is_known() -> None:
    assert set(COMMITTED) == {*MADE, *BY_HAND}
    others = [p for end in ("png", "jpg", "gif") for f in ("docs", "results")
              for p in (ROOT / f).rglob(f"*.{end}")]  # fmt: skip
    assert not others, "a picture with a ground of its own"


@pytest.mark.parametrize("name", [Path(p).stem for p in MADE if "/experiments/" in p])
def test_the_title_of_a_picture_is_its_message(name: str) -> None:
    """Mend the YAML's `message` where a result does not bear it any more."""
    experiment = read_all()[name]
    result = json.loads((ROOT / f"results/experiments/{name}.json").read_text(encoding="utf-8"))
    assert title(experiment, result) != experiment.question
    assert not title(experiment, result).endswith("?")


def test_what_is_reused_looks_the_same_in_all_pictures() -> None:
    """KV at old positions was orange in one picture and red in another."""
    drawn = [ROOT / f"results/{name}.svg" for name in ("quality", "experiments/context_overflow")]
    for path in drawn:
        svg = path.read_text(encoding="utf-8")
        used = set(HEX.findall(svg)) & {*palette.SYSTEMS.values(), *palette.OTHERS}
        assert used == {palette.color("moved"), palette.color("old positions")}, path


def texts(svg: str) -> list[str]:
    return [
        "".join(node.itertext()).strip()
        for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.parametrize("path", COMMITTED)
def test_a_picture_has_the_palettes_colours_and_readers_names(path: str) -> None:
    svg = (ROOT / path).read_text(encoding="utf-8")
    known = {palette.INK, palette.ON_TINT, *palette.TINTS.values(), *palette.OTHERS}
    known |= set(palette.SYSTEMS.values())
    styles = re.findall(r"(?:fill|stroke|stop-color)(?:: |=\")(#\w+|[a-z]+)", svg)
    assert {s for s in styles if s not in ("none", "url", "context-stroke")} <= known
    assert not {"re", "bound", "attnstore", "vllm", "lmcache"} & set(texts(svg))


@pytest.mark.parametrize("path", MADE)
def test_a_picture_is_what_its_file_says_and_no_words_collide(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plot the words: matplotlib's versions differ in where they stand."""
    file, draw = MADE[path]
    drawn = tmp_path / "drawn.svg"
    figures: list[Any] = []
    save = palette.save

    def keep(made: Any, to: Path) -> None:
        figures.append(made)
        save(made, to)

    monkeypatch.setattr(palette, "save", keep)
    draw(json.loads((ROOT / file).read_text(encoding="utf-8")), drawn)
    there, again = (at.read_text(encoding="utf-8") for at in (ROOT / path, drawn))
    assert texts(again) == texts(there), "run python -m benchmarks.pictures"
    if not figures:
        assert again == there, "run python -m benchmarks.pictures"
    for figure in figures:
        boxes = list(shown_boxes(figure))
        assert len(boxes) > 5
        assert not overlaps(boxes)
        assert not outside(boxes, *(figure.bbox.width, figure.bbox.height))


def test_the_heros_numbers_are_the_demos() -> None:
    demo = json.loads((ROOT / "results/demo.json").read_text(encoding="utf-8"))
    said = " ".join(texts(hero.hero(demo)))
    alone, ours = demo["sides"]
    for side in (alone, ours):
        assert f"{side['ttft_later_turns_median_ms']:.0f} ms" in said
        assert f"p95 {side['ttft_later_turns_p95_ms']:.0f} ms" in said
    ratio = alone["ttft_later_turns_median_ms"] / ours["ttft_later_turns_median_ms"]
    assert f"{ratio:.1f} times sooner" in said
    tokens = ours["prompt_tokens"]
    for tier in ("DRAM", "NVMe", "computed"):
        assert f"{tier} {100 * tokens[tier] / sum(tokens.values()):.0f} %" in said
    alone["ttft_later_turns_median_ms"] = ours["ttft_later_turns_median_ms"] / 2
    assert "2.0 times as late" in " ".join(texts(hero.hero(demo)))


def overlaps(boxes: list[tuple[str, tuple[float, float, float, float]]]) -> list[str]:
    """Words that stand on others; a box has its ends in x and in y."""
    return [
        f"{one!r} on {other!r}"
        for (one, a), (other, b) in combinations(boxes, 2)
        if min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 1
    ]


def outside(
    boxes: list[tuple[str, tuple[float, float, float, float]]], width: float, height: float
) -> list[str]:
    return [
        words
        for words, (left, bottom, right, top) in boxes
        if left < -1 or bottom < -1 or right > width + 1 or top > height + 1
    ]


def shown_boxes(figure: Any) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Its words and where they stand. Ticks beyond an axis' ends are made, and not drawn."""
    figure.draw_without_rendering()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            hidden |= {tick.label2} if low <= tick.get_loc() <= high else {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            box = text.get_window_extent()
            yield text.get_text(), (box.x0, box.y0, box.x1, box.y1)


@pytest.mark.parametrize("name", ["hero", "restart", "tiers", "turn", "truncation"])
def test_no_words_of_a_drawing_collide(name: str) -> None:
    tree = ElementTree.parse(ROOT / "docs/images" / f"{name}.svg").getroot()
    _, _, width, height = map(float, tree.attrib["viewBox"].split())
    boxes = list(drawn_boxes(tree, {"font-size": "15"}))
    assert len(boxes) > 5
    assert not overlaps(boxes)
    assert not outside(boxes, width, height)


def drawn_boxes(
    node: ElementTree.Element, above: dict[str, str]
) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Where words stand, by a letter's usual width: 0.55 of its height."""
    here = above | node.attrib
    if node.tag.endswith("}text"):
        words, size = "".join(node.itertext()), float(here["font-size"])
        wide, x, y = 0.55 * size * len(words), float(here["x"]), float(here["y"])
        left = x - wide * {"middle": 0.5, "end": 1.0}.get(here.get("text-anchor", ""), 0.0)
        yield words, (left, y - 0.8 * size, left + wide, y + 0.2 * size)
    for child in node:
        yield from drawn_boxes(child, here)
