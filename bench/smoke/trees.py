"""Makes the two source trees that are compared: a git worktree of the base commit, and a copy of the working tree as it is now.

Both lie at fixed paths in Headrace's cache folder and their files get one fixed time, because Numba finds compiled kernels by path and
time: a second run then compiles nothing. Each side has a cache of its own. The trees are removed at the end, the caches are kept.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAIN_BRANCH = "main"
FIXED_TIME = 1_600_000_000
"""Seconds since 1970."""


class SmokeError(Exception):
    """The comparison cannot be made; says why, for people."""


@dataclass(frozen=True, slots=True)
class Side:
    """name: "base" or "candidate"; source: its `src` folder; cache: where its compiled kernels and packed weights are kept."""

    name: str
    source: Path
    cache: Path

    def environ(self) -> dict[str, str]:
        """This process's environment with that side's package first on the path."""
        return {**os.environ, "PYTHONPATH": str(self.source), "HEADRACE_CACHE_DIR": str(self.cache), "PYTHONHASHSEED": "0"}


def default_base(root: Path) -> str:
    """What to compare with when nothing is said: on a branch, where it left the main branch; on the main branch, HEAD where tracked files
    differ from it (what is about to be committed), else the commit before.

    Raises: SmokeError outside of a checkout, or without a commit to compare with.
    """
    head = git(root, "rev-parse", "HEAD")
    try:
        base = git(root, "merge-base", "HEAD", MAIN_BRANCH)
    except SmokeError:
        base = head  # no main branch here
    if base != head:
        return base
    return head if git(root, "status", "--porcelain", "--untracked-files=no", "--", "src") else git(root, "rev-parse", "HEAD~1")


def git(root: Path, *arguments: str) -> str:
    """Raises SmokeError with git's own words."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SmokeError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def two_trees(root: Path, commit: str, home: Path) -> Iterator[tuple[Side, Side]]:
    """(base, candidate) for the time of the block. Raises SmokeError where another comparison runs in `home`, or git refuses."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SmokeError(f"another comparison runs in {home}") from error
        base, candidate = home / "base", home / "candidate"
        _remove(root, base, candidate)  # of a run that was killed
        try:
            git(root, "worktree", "add", "--detach", "--force", str(base), commit)
            shutil.copytree(root / "src", candidate / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            for tree in (base, candidate):
                _fix_times(tree / "src")
            yield Side("base", base / "src", home / "cache-base"), Side("candidate", candidate / "src", home / "cache-candidate")
        finally:
            _remove(root, base, candidate)


def _remove(root: Path, base: Path, candidate: Path) -> None:
    for tree in (base, candidate):
        shutil.rmtree(tree, ignore_errors=True)
    git(root, "worktree", "prune")


def _fix_times(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (FIXED_TIME, FIXED_TIME))
