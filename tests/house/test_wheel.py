"""The wheel holds everything the source does, and a server runs from it where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.chat.child import URL_LINE
from tests.house.reader import ROOT, SOURCE

pytestmark = pytest.mark.process

NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc", ".*")


def run(*command: str, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing left in the checkout by an earlier build can get in."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=NOT_SHIPPED)
    (folder / "dist").mkdir()
    run(sys.executable, "-c", BUILD, folder=folder)
    (found,) = (folder / "dist").glob("headrace-*.whl")
    return found


def test_the_wheel_holds_every_file_of_the_package_and_its_code_runs_elsewhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if name.startswith("headrace/")}
        [points] = [packed.read(name) for name in packed.namelist() if name.endswith("/entry_points.txt")]
        packed.extractall(tmp_path / "site")
    source = {
        f"headrace/{path.relative_to(SOURCE)}"
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    assert source - inside == set()
    assert inside - source == set()
    assert "headrace = headrace.cli.main:main" in points.decode()
    code = "import headrace, headrace.cli.main; print(headrace.__file__)"
    environment = environment_of(tmp_path / "site")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


def environment_of(site: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADRACE_"))}
    return {**kept, "PYTHONPATH": str(site), "HEADRACE_STATE": str(site.parent / "state")}


@contextmanager
def serving(site: Path, *arguments: str) -> Iterator[str]:
    """`headrace serve` from the installed wheel, in a folder of its own. Yields the URL it prints."""
    command = [str(site / "bin" / "headrace"), "serve", "--port", "0", *arguments]
    environment = environment_of(site)
    process = subprocess.Popen(command, cwd=site.parent, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said, found = "", None
        while found is None and (line := process.stderr.readline()):
            said, found = said + line, URL_LINE.search(line)
        assert found is not None, said
        yield found.group(1)
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()
    assert process.returncode == 0


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    options = ("--quiet", "--no-deps", "--no-index", "--target", "site", str(wheel))
    run(sys.executable, "-m", "pip", "install", *options, folder=tmp_path)
    return tmp_path / "site"


@pytest.mark.slow
def test_server_runs_from_the_wheel(installed: Path) -> None:
    question = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
    # Reference kernels: compiling the others again for the new path would take most of a minute and is tested elsewhere.
    with serving(installed, "--kernels", "reference", "--num-kv-blocks", "256", "--max-model-len", "256") as url:
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= answer["usage"]["completion_tokens"] <= 8
