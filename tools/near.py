"""Runs the tests that are near what the working tree changes, within two minutes. It is for the time between two edits, and no proof.

    python tools/near.py [BASE]        what differs from BASE, which is HEAD unless given, and what git does not know yet

src/headrace/A/b.py   tests/A/test_b*.py, then the tests beside them
tests/A/test_b.py     itself
tests/A/conftest.py   the tests beside it
another file of tests what imports it
bench/, tools/        tests/tools/

Left out are tests that are slow, start processes, measure or need a GPU. Exits with 1 if a test failed. What was not run for want of time
is named, and is no failure.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 110.0
LEAVE_S = 15.0
"""Seconds that pytest has to write what it knows, after it was asked to end."""
LEAST_S = 5.0
"""With less time left no run begins."""
MANY = 30
"""Of a folder with more test files than this, the folders below it are left out."""
CHOICE = ("-m", "not slow and not gpu and not timing", "--kinds", "pure,loop,socket")
NO_TESTS = 5
"""Exit status of pytest where no test was left to run."""
IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Near:
    """mirrored: test files of what changed; beside: the other ones of their folders; unknown: changed files that no rule names."""

    mirrored: tuple[str, ...]
    beside: tuple[str, ...]
    unknown: tuple[str, ...]


def near(changed: Iterable[str], files: Mapping[str, str]) -> Near:
    """What to run. files: every Python file below tests/, and its text."""
    tests = sorted(name for name in files if is_test(name))
    mirrored: dict[str, None] = {}
    beside: dict[str, None] = {}
    unknown = []
    for name in changed:
        own, others = _near_one(PurePosixPath(name), tests, files)
        if not own and not others:
            unknown.append(name)
        mirrored |= dict.fromkeys(own)
        beside |= dict.fromkeys(others)
    return Near(tuple(mirrored), tuple(name for name in beside if name not in mirrored), tuple(unknown))


def is_test(name: str) -> bool:
    return re.fullmatch(r"tests/(.*/)?test_\w+\.py", name) is not None


def _near_one(path: PurePosixPath, tests: Sequence[str], files: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(mirrored, beside) of one changed file."""
    match path.parts:
        case ("src", "headrace", *_) if path.suffix == ".py":
            folder = PurePosixPath("tests", *path.parts[2:-1])
            while folder.name and not _below(folder, tests):
                folder = folder.parent
            if folder == PurePosixPath("tests"):
                return [name for name in tests if _mirrors(name, folder, path.stem)], []
            return [name for name in tests if _mirrors(name, folder, path.stem)], _below(folder, tests)
        case ("tests", *_) if is_test(str(path)):
            return [name for name in tests if name == str(path)], []
        case ("tests", _, *_, "conftest.py"):
            return [], _below(path.parent, tests)
        case ("tests", *_) if path.suffix == ".py":
            return [name for name in importers(path.stem, files) if is_test(name)], []
        case ("bench" | "tools", *_):
            return [], _below(PurePosixPath("tests/tools"), tests)
    return [], []


def _mirrors(test: str, folder: PurePosixPath, stem: str) -> bool:
    path = PurePosixPath(test)
    return path.parent == folder and path.stem.startswith(f"test_{stem}")


def _below(folder: PurePosixPath, tests: Sequence[str]) -> list[str]:
    """The test files of a folder, and where they are few of the folders below it."""
    all_of_it = [name for name in tests if folder in PurePosixPath(name).parents]
    return all_of_it if len(all_of_it) <= MANY else [name for name in all_of_it if PurePosixPath(name).parent == folder]


def importers(module: str, files: Mapping[str, str]) -> list[str]:
    """Files that import the module by its last name, or one that does."""
    imported = {name: {word.rpartition(".")[2] for word in IMPORT.findall(text)} for name, text in files.items()}
    modules, found = {module}, set[str]()
    while new := {name for name, words in imported.items() if words & modules} - found:
        found |= new
        modules |= {PurePosixPath(name).stem for name in new if not is_test(name)}
    return sorted(found)


def run(tests: Sequence[str], until: float) -> tuple[bool, set[str]]:
    """(no test failed, the files of which a test was run). Ends at `until`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *CHOICE, "-n", "2", "--dist", "loadfile", f"--junitxml={report}", *tests]
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(LEAVE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                status = 0
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    has_failed = any(case.find(kind) is not None for case in cases for kind in ("failure", "error"))
    names = [case.get("classname", "") + "." for case in cases]
    seen = {test for test in tests if any(name.startswith(test.removesuffix(".py").replace("/", ".") + ".") for name in names)}
    return not has_failed and status in (0, NO_TESTS), seen


def changed_files(base: str) -> list[str]:
    differing = ["git", "diff", "--name-only", base]
    unknown_to_git = ["git", "ls-files", "--others", "--exclude-standard"]
    lines = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in (differing, unknown_to_git)
    ]
    return "".join(lines).splitlines()


def main(arguments: Sequence[str]) -> int:
    until = time.monotonic() + LIMIT_S
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    found = near(changed_files(arguments[0] if arguments else "HEAD"), files)
    for title, names in (("mirrored", found.mirrored), ("beside them", found.beside), ("no test is near", found.unknown)):
        print(f"{title}: {' '.join(names) or '-'}", flush=True)
    is_well = True
    for tests in (found.mirrored, found.beside):
        if tests and until - time.monotonic() < LEAST_S:
            print(f"not run for want of time: {' '.join(tests)}")
        elif tests:
            was_well, seen = run(tests, until)
            is_well = is_well and was_well
            if time.monotonic() >= until and (missing := [name for name in tests if name not in seen]):
                print(f"not run for want of time: {' '.join(missing)}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
