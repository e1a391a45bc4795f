"""Commits that documents and results name are in the history."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.house.reader import ROOT

pytestmark = pytest.mark.process


def test_the_index_names_commits_that_recorded_an_experiment() -> None:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False)
    if shallow.stdout.strip() != "false":
        pytest.skip("no history here to look commits up in")
    index = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8").partition("\n## Index\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"\| ([0-9a-f]{7,40}) \|", index))
    history = [*git, "log", "--format=%H", "--", "docs/experiments.md"]
    touched = subprocess.run(history, capture_output=True, text=True, check=True).stdout.split()
    assert named
    assert not [commit for commit in sorted(named) if not any(full.startswith(commit) for full in touched)]


def test_commits_of_results_exist_or_say_why_not() -> None:
    """A result measured on a commit outside the history of HEAD carries a `commit_note`; a rebased commit stays as an object."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False)
    if shallow.stdout.strip() != "false":
        pytest.skip("no history here to look commits up in")
    named: dict[str, str] = {}
    for file in sorted((ROOT / "bench" / "results").rglob("*.json")):
        found = json.loads(file.read_bytes())
        environment = found.get("environment", found) if isinstance(found, dict) else {}
        commit = re.match(r"[0-9a-f]{7,40}", str(environment.get("commit") or ""))
        if commit and "commit_note" not in environment:
            named.setdefault(commit.group(), str(file.relative_to(ROOT)))
    history = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True).stdout.split()
    missing = [commit for commit in named if not any(full.startswith(commit) for full in history)]
    assert not missing, [f"{commit} in {named[commit]}" for commit in missing]
