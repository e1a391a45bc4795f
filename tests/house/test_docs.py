"""Docs stay true in form: Python blocks compile, links lead somewhere, text is ASCII."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.reader import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def code_blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """(line of the fence, text) of each block in `language`."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match.group(1) == language:
            yield text.count("\n", 0, match.start()) + 1, match.group(2)


def anchors(page: Path) -> set[str]:
    """Heading anchors as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    for line, block in code_blocks(page, "python"):
        compile(block, f"{page.relative_to(ROOT)}:{line}", "exec")


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


def test_every_module_says_what_it_is() -> None:
    import ast

    for path in sorted((ROOT / "src").rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path.relative_to(ROOT)} has no docstring"
