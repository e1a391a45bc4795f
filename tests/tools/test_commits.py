"""Tests that commits that documents and results name are in the history."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.house.reader import ROOT

pytestmark = pytest.mark.process


def test_every_experiment_names_a_commit_that_recorded_it() -> None:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False)
    if shallow.stdout.strip() != "false":
        pytest.skip("no history here to look commits up in")
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^### (.+)$((?:\n(?!#).*)*)", text, re.MULTILINE))
    named = {title: re.search(r"\[((?:[0-9a-f]{7,40}(?:,\s)?)+)[\[\]]", body) for title, body in entries.items()}
    assert entries
    assert not [title for title, commits in named.items() if commits is None]
    history = [*git, "log", "--format=%H", "--", "docs/experiments.md"]
    touched = subprocess.run(history, capture_output=True, text=True, check=True).stdout.split()
    commits = {commit for match in named.values() if match for commit in re.findall(r"[0-9a-f]{7,40}", match[1])}
    assert not [commit for commit in sorted(commits) if not any(full.startswith(commit) for full in touched)]


def commits_in(found: object) -> Iterator[str]:
    """What stands under `commit`, at any depth of a result."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name == "commit" and (commit := re.match(r"[0-9a-f]{7,40}", str(value or ""))):
                yield commit.group()
            else:
                yield from commits_in(value)
    elif isinstance(found, list):
        for value in found:
            yield from commits_in(value)


def test_commits_of_results_exist() -> None:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False)
    if shallow.stdout.strip() != "false":
        pytest.skip("no history here to look commits up in")
    files = {file: set(commits_in(json.loads(file.read_bytes()))) for file in sorted((ROOT / "bench" / "results").rglob("*.json"))}
    assert any(files.values())
    history = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True).stdout.split()
    known = {full[:length] for full in history for length in range(7, 41)}
    missing = [f"{commit} in {file.relative_to(ROOT)}" for file, commits in files.items() for commit in commits if commit not in known]
    assert not missing
