"""Plants known bugs, one at a time, and demands that a named test fails.

    python tests/mutants/run.py [NAME ...]

A suite whose zeros mean something must catch these bugs. Each mutant is a one-place change of a copy of the source, and the test it names
runs against the copy. The results of the mutants that ran are written to tests/mutants/results.json, each with its commit. A mutant whose
text no longer occurs in the source is an error: it must follow the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True, slots=True)
class Mutant:
    """name: the bug in words; path: below src/headrace; old -> new: the change, old occurs exactly once; test: pytest node or file."""

    name: str
    path: str
    old: str
    new: str
    test: str


def mutants() -> list[Mutant]:
    rows = json.loads(Path(__file__).with_name("mutants.json").read_text())
    return [Mutant(**row) for row in rows]


def plant(mutant: Mutant, source: Path) -> None:
    path = source / "headrace" / mutant.path
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.path}, must be once")
    path.write_text(text.replace(mutant.old, mutant.new))


def run_test(test: str, source: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *test.split()]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def is_caught(mutant: Mutant) -> tuple[bool, str]:
    """Whether the test fails because of the bug, and which one did."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(ROOT / "src" / "headrace", source / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
        plant(mutant, source)
        done = run_test(mutant.test, source)
    red = [line.removeprefix("FAILED ").split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return done.returncode == 1 and bool(red), red[0] if red else (done.stdout + done.stderr).strip()[-200:]


def write_results(fresh: list[dict[str, Any]]) -> None:
    """Replace these rows of the committed result; rows of mutants that are no longer planted go."""
    rows = {row["name"]: row for row in [*json.loads(RESULTS.read_text()), *fresh]}
    RESULTS.write_text(json.dumps([rows[mutant.name] for mutant in mutants() if mutant.name in rows], indent=1) + "\n")


def commit_of_source() -> str:
    """The commit that was tested. Raises SystemExit where the source differs from it: such a result could not be repeated."""
    if git("status", "--porcelain", "--", "src", "tests/mutants/mutants.json"):
        raise SystemExit("commit the source and the list of planted bugs first: a result names the commit it is of")
    return git("rev-parse", "--short=12", "HEAD")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def chosen_by(arguments: list[str]) -> list[Mutant]:
    """All without a name. Raises SystemExit for a name that none has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a planted bug, in full; without one all are planted")
    names, rows = parser.parse_args(arguments).names, mutants()
    known = [mutant.name for mutant in rows]
    for name in names:
        if name not in known:
            near = "; ".join(get_close_matches(name, known, cutoff=0.4)) or "none; mutants.json has all"
            parser.error(f"no planted bug is named {name!r}. Near: {near}")
    return [mutant for mutant in rows if not names or mutant.name in names]


def main(chosen: list[Mutant]) -> int:
    clean = run_test(" ".join(sorted({mutant.test for mutant in chosen})), ROOT / "src")
    if clean.returncode != 0:
        print(clean.stdout[-3000:], clean.stderr[-1000:])
        raise SystemExit("the tests fail without any planted bug")
    commit = commit_of_source()
    results = []
    for mutant in chosen:
        caught, red = is_caught(mutant)
        print(f"{'caught' if caught else 'MISSED'}  {mutant.name}: {red}", flush=True)
        results.append({**asdict(mutant), "caught": caught, "red": red, "commit": commit})
    write_results(results)
    missed = [row["name"] for row in results if not row["caught"]]
    print(f"{len(results) - len(missed)} of {len(results)} planted bugs caught" + (f"; missed: {missed}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(chosen_by(sys.argv[1:])))
