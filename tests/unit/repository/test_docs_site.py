# SPDX-License-Identifier: Apache-2.0
"""The docs site: every page and picture is in it, its search finds names, tables are readable."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from tools import docs_site

ROOT = Path(__file__).resolve().parents[3]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]


def test_every_page_is_in_the_nav() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in DOCS}
    assert set(re.findall(r"([\w/-]+\.md)", nav)) == pages


def test_the_site_finds_settings_and_metrics_and_opens_as_files() -> None:
    """Its search splits names as the pages have them; `offline` keeps the index in a script."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (separator,) = re.findall(r"search: \{separator: '(.+)'\}", text)
    for name, words in (
        ("nvme.io_deadline", ["nvme", "io", "deadline"]),
        (
            "`vllm:attnstore_loaded_tokens_total{tier=",
            ["vllm", "attnstore", "loaded", "tokens", "total", "tier"],
        ),
    ):
        assert [word for word in re.split(separator, name) if word] == words
    assert "  - offline" in text and "use_directory_urls: false" in text
    assert "extra: {polyfills: [iframe-worker.js]}" in text, "`offline` asks another site for one"
    assert (ROOT / "docs" / "iframe-worker.js").is_file()


def test_a_search_for_a_name_finds_the_page_that_explains_it_first() -> None:
    """And pages of readers of the code last: `codec` led to a note of what was tried."""

    def boost(name: str, *sections: str) -> float:
        above = [SimpleNamespace(title=title) for title in sections]
        page = SimpleNamespace(meta={}, file=SimpleNamespace(src_uri=name), ancestors=above)
        docs_site.on_page_markdown("", page)
        return float(page.meta["search"]["boost"])

    note = boost("notes/2026-11-codecs.md", "Notes", "Internals")
    assert note == boost("format.md", "Internals") < 1
    assert boost("faq.md") == 1 < boost("runbook.md", "Operations") < boost("configuration.md")


def test_what_users_do_not_need_comes_last() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    before, _, internals = nav.partition("- Internals:")
    for page in ("overlap.md", "faults.md", "notes/"):
        assert page in internals and page not in before
    assert not re.search(r"^  - ", internals, re.MULTILINE)


def test_results_are_at_most_twelve_screens() -> None:
    """A screen has some 40 lines of 100 characters."""
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    assert sum(1 + len(line) // 100 for line in lines) <= 12 * 40


def test_names_in_tables_break_at_their_joints() -> None:
    """Elsewhere, and in blocks of code, a browser has the room."""
    name = "vllm:attnstore_chunks_total{event}"
    row = f"<td>a_b <code>{name}</code></td>"
    parts = "vllm:<wbr>attnstore_<wbr>chunks_<wbr>total{<wbr>event}"
    assert docs_site.on_page_content(f"<p><code>{name}</code></p>{row}") == (
        f"<p><code>{name}</code></p><td>a_b <code>{parts}</code></td>"
    )
    assert docs_site.on_page_content("<td><code>MultiConnector, 2TiB</code></td>") == (
        "<td><code>Multi<wbr>Connector, 2TiB</code></td>"
    )
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "hooks: [tools/docs_site.py]" in text and "extra_css: [site.css]" in text


def test_a_search_finds_the_row_of_a_metric_or_a_cause() -> None:
    """It knows headings alone: a metric's name led to an alert that has one of its words."""
    cells = ("<code>vllm:attnstore_chunks_total{event}</code>", "what <a href='x'>happened</a>", "")
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    name = "<tr><td><code>lost</code>, <code>gone</code></td><td>it went</td></tr>"
    line = "<tr><td><code>a chunk is lost: ...</code></td><td>one read failed</td></tr>"
    table = f"<h3 id='causes'>Causes</h3><tr>{row}</tr>{name}{line}<tr><td>plain</td></tr>{name}"
    page = SimpleNamespace(
        meta={"search": {"boost": 4}},
        file=SimpleNamespace(src_uri="runbook.md"),
        url="runbook.html",
    )
    html = docs_site.on_page_content(table, page=page)
    assert re.findall(r'<tr id="([^"]+)">', html) == [
        "vllm-attnstore_chunks_total-event",
        "lost",
        "a-chunk-is-lost",
        "lost-2",
    ]
    index = SimpleNamespace(entries=["the page"])
    config = SimpleNamespace(plugins={"material/search": SimpleNamespace(search_index=index)})
    docs_site.on_post_page("", page=page, config=config)
    assert index.entries[:2] == [
        "the page",
        {
            "location": "runbook.html#vllm-attnstore_chunks_total-event",
            "title": "<code>vllm:attnstore_chunks_total</code>",
            "text": "<p>what happened</p>",
            "boost": 4,
        },
    ]
    boosts = [entry["boost"] for entry in index.entries[2:]]
    assert boosts[0] == boosts[2] == 4 > boosts[1], "common words of a line beat a name"
    other = SimpleNamespace(meta={}, file=SimpleNamespace(src_uri="design.md"), url="design.html")
    assert "id=" not in docs_site.on_page_content(name, page=other)


def test_every_picture_is_on_a_page() -> None:
    """One that was drawn and is shown nowhere convinces no reader."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    drawn = [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "results").rglob("*.svg")]
    shown = {Path(target).name for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", pages)}
    assert {path.name for path in drawn} <= shown


def test_lists_and_tables_get_their_empty_line() -> None:
    given = ["a", "- b", "- c", "", "d", "| e |", "|---|", "```", "x", "- no", "```"]
    assert list(docs_site.spaced(given)) == [
        "a",
        "",
        "- b",
        "- c",
        "",
        "d",
        "",
        "| e |",
        "|---|",
        "```",
        "x",
        "- no",
        "```",
    ]
