"""Tests that docs stay true: Python blocks compile, those of the README run, links lead somewhere, text is ASCII."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import pytest

from headrace import LLM
from tests.house.reader import ROOT, Module

pytestmark = pytest.mark.pure

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SERVER = re.compile(r"https?://")
PRINTS = re.compile(r"#\s*prints:\s*(.+?)\s*$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def code_blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """(line of the fence, text) of each block in `language`."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match.group(1) == language:
            yield text.count("\n", 0, match.start()) + 1, match.group(2)


def runnable_blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks that need no server: those that name no URL."""
    return [(line, block) for line, block in code_blocks(page, "python") if not SERVER.search(block)]


def anchors(page: Path) -> set[str]:
    """Heading anchors as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    for line, block in code_blocks(page, "python"):
        compile(block, f"{page.relative_to(ROOT)}:{line}", "exec")


def test_the_readme_can_be_tried_without_a_server() -> None:
    assert runnable_blocks(ROOT / "README.md")


@pytest.mark.socket
@pytest.mark.parametrize("block", [pytest.param(block, id=f"line {line}") for line, block in runnable_blocks(ROOT / "README.md")])
def test_python_blocks_of_the_readme_run_and_print_what_they_announce(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`# prints: X` announces X; a block that announces nothing prints at least a word."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(block, "README.md", "exec"), names)
    for made in names.values():
        if isinstance(made, LLM):
            with made:
                pass  # ends its threads
    printed = capsys.readouterr().out
    announced = PRINTS.findall(block)
    assert all(text in printed for text in announced), f"{announced} announced, printed: {printed!r}"
    assert re.search(r"[A-Za-z]{2,}", printed), f"printed: {printed!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.relative_to(ROOT)} links to {target}"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{page.relative_to(ROOT)}: no heading for {target}"


def test_source_is_ascii() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        odd = next(((number, line) for number, line in enumerate(text.splitlines(), 1) if not line.isascii()), None)
        assert odd is None, f"{path.relative_to(ROOT)}:{odd[0]}: {odd[1]!a}" if odd else ""


def test_every_module_says_what_it_is(house: dict[str, Module]) -> None:
    for module in house.values():
        assert module.name.endswith("_pb2") or ast.get_docstring(module.tree), f"{module.shown_path} has no docstring"


RECORDED = {
    "163 tok/s": ("none", "decode_1", "tok_s"),
    "79 %": ("none", "decode_1", "mbu"),
    "266 in FP8": ("fp8", "decode_1", "tok_s"),
    "21,112 tok/s": ("fp8", "decode_256", "tok_s"),
}
"""Figure of README -> field of the record of one H100."""


def test_each_figure_of_the_readme_is_that_of_a_record() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "bench" / "results" / "nvidia-h100-80gb" / "gpu.json").read_text(encoding="utf-8"))
    for figure, path in RECORDED.items():
        value = reduce(lambda part, key: part[key], path, record["values"])
        shown = f"{100 * value:.0f}" if path[-1] == "mbu" else f"{value:,.0f}"
        assert figure.startswith(shown), figure
        assert figure in text, figure
    assert "9,531 of the whole run" in text
    assert any(row.startswith("fp8") and "21,112 tok/s 71% (run 9,531)" in row for row in record["rows"])
    units = re.findall(r"[\d.,]*\d (?:tok/s\b|tokens/s\b|%|ms\b|s\b|GB\b|x\b|times\b|minutes\b)", text)
    assert set(units) <= set(RECORDED), "a figure without a record"
