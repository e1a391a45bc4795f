"""Tests that imports point downwards only. Every import of every file is read, function bodies included."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.house.floors import (
    FLOORS,
    FOLDERS_WITHOUT_CIRCLES,
    HOLD_WHOLE_CONFIG,
    PACKAGE_EXPORTS,
    POLICY_STDLIB,
    PRIVATE,
    Floor,
    floor_of,
    is_within,
)
from tests.house.reader import ROOT, Import, Module, find_cycles

pytestmark = pytest.mark.pure


def _is_ours(target: str) -> bool:
    return is_within(target, "headrace")


def _verdict(module: str, row: str, floor: Floor, found: Import) -> str | None:
    """Why this import breaks the floor, or None."""
    target = found.target
    if _is_ours(target):
        within = row != "headrace" and is_within(target, row)
        if target == "headrace" or within or any(is_within(target, prefix) for prefix in floor.ours):
            return None
        if module == "headrace" and target in PACKAGE_EXPORTS and (found.is_lazy or found.is_typing):
            return None
        return f"{row} may import of ours only: {', '.join(floor.ours) or 'nothing'}"
    top = target.split(".")[0]
    if top in sys.stdlib_module_names:
        if is_within(module, "headrace.policy") and top not in POLICY_STDLIB and not found.is_typing:
            return "pure decisions use no clock, socket, thread or random numbers of their own"
        return None
    if top in floor.third:
        return None
    if top in floor.lazy:
        return None if found.is_lazy or found.is_typing else f"{row} may import {top} only inside a function"
    return f"{row} may import of other people's only: {', '.join(floor.third) or 'nothing'}; lazily: {', '.join(floor.lazy) or 'nothing'}"


def _broken(house: dict[str, Module]) -> Iterator[str]:
    for module in house.values():
        row, floor = floor_of(module.name)
        for found in module.imports:
            if verdict := _verdict(module.name, row, floor, found):
                yield f"{module.shown_path}:{found.line} imports {found.target}: {verdict}"


def test_imports_point_downwards_only(house: dict[str, Module]) -> None:
    broken = sorted(set(_broken(house)))
    assert not broken, "\n" + "\n".join(broken)


def test_every_package_has_a_floor(house: dict[str, Module]) -> None:
    for name in house:
        floor_of(name)


def test_no_row_permits_what_is_not_there(house: dict[str, Module]) -> None:
    used: dict[str, set[str]] = {row: set() for row in FLOORS}
    rows = {name: floor_of(name)[0] for name in house}
    for name, module in house.items():
        used[rows[name]] |= {found.target.split(".")[0] for found in module.imports}
    ghosts = [f"{row} covers no module" for row in FLOORS if row not in rows.values()]
    for row, floor in FLOORS.items():
        ghosts += [f"{row} may import {name}, and does not" for name in (*floor.third, *floor.lazy) if name not in used[row]]
        ghosts += [
            f"{row} may import {prefix}, which does not exist" for prefix in floor.ours if not any(is_within(n, prefix) for n in house)
        ]
    assert not ghosts, "\n" + "\n".join(ghosts)


def test_modules_import_each_other_in_no_cycle(house: dict[str, Module]) -> None:
    edges = {
        name: {found.target for found in module.imports if found.target in house and found.target != name and not found.is_typing}
        for name, module in house.items()
    }
    cycles = find_cycles(edges)
    assert not cycles, "modules that import each other: " + "; ".join(" <-> ".join(cycle) for cycle in cycles)


@pytest.mark.parametrize("package", FOLDERS_WITHOUT_CIRCLES)
def test_folders_import_each_other_in_no_circle(package: str, house: dict[str, Module]) -> None:
    """A folder is one idea: two that import each other, module by module without a cycle, are one idea in two places."""
    edges: dict[str, set[str]] = {}
    for name, module in house.items():
        if (part := _part(name, package)) is not None:
            edges.setdefault(part, set()).update(to for found in module.imports if (to := _part(found.target, package)) not in (None, part))
    cycles = find_cycles(edges)
    assert not cycles, "folders that import each other: " + "; ".join(" <-> ".join(cycle) for cycle in cycles)


def test_the_gateway_has_few_files_at_its_top(house: dict[str, Module]) -> None:
    """What has an idea of its own stands in a folder; the top composes."""
    top = [name for name, module in house.items() if module.path.parent == ROOT / "src" / "headrace" / "gateway"]
    assert 1 < len(top) <= 8, f"{len(top)} files: {', '.join(sorted(top))}"


def _part(name: str, package: str) -> str | None:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["headrace", package] and len(parts) > 2 else None


def test_no_component_takes_the_whole_configuration_of_the_gateway(house: dict[str, Module]) -> None:
    """Whatever takes all of it depends on all of it, and says nothing of what it reads."""
    takers = {
        module.name: f"{module.shown_path}:{node.lineno}"
        for name, module in house.items()
        if is_within(name, "headrace.gateway")
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Name) and node.id == "GatewayConfig") or (isinstance(node, ast.alias) and node.name == "GatewayConfig")
    }
    found = [place for name, place in takers.items() if name not in HOLD_WHOLE_CONFIG]
    assert not found, f"GatewayConfig is named by {', '.join(found)}"
    assert sorted(takers) == sorted(HOLD_WHOLE_CONFIG), "a module that may hold it does"


@pytest.mark.parametrize("package", PRIVATE)
def test_nobody_outside_imports_what_a_table_finds(package: str, house: dict[str, Module]) -> None:
    outside = (module for name, module in house.items() if not is_within(name, package))
    found = [f"{module.shown_path}:{each.line}" for module in outside for each in module.imports if is_within(each.target, package)]
    assert not found, f"{package} is imported by {', '.join(found)}"


def test_architecture_page_names_every_package(house: dict[str, Module]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {name.split(".")[1] for name in house if name.count(".") >= 1}
    missing = sorted(name for name in packages if f"`{name}`" not in page and f"`{name}.py`" not in page)
    assert not missing, f"docs/architecture.md does not name: {', '.join(missing)}"
