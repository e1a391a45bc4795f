"""Runs client libraries against `headrace serve` of the bundled model, each in an environment of its own.

    python tests/clients/run.py [LIBRARY ...]

An environment is made below .venv-clients/ with the versions of LIBRARIES, which takes a package index. The results of the libraries that
ran are written to tests/clients/results.json. Exit code 1: a case that the server must hold did not pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.cli.chat.child import started_server

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
TIMEOUT_S = 600.0

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "openai": ("openai==3.54.0",),
    "langchain": ("langchain-openai==1.7.3", "langchain-core==1.7.2"),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "instructor": ("instructor==1.17.0",),
}
"""with_NAME.py -> what its environment has."""


def environment(name: str) -> Path:
    """The Python of a library's environment, which is made where it is missing."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *LIBRARIES[name]], check=True)
    return python


def results_of(name: str, url: str) -> list[dict[str, Any]]:
    variables = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    variables.pop("PYTHONPATH", None)
    command = [str(environment(name)), str(HERE / f"with_{name}.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(names: list[str]) -> int:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with started_server(None) as url:
        made = {name: results_of(name, url) for name in names or LIBRARIES}
    for name, cases in made.items():
        for case in cases:
            says = "passed" if case["passed"] else "FAILED" if case["is_bound"] else "not followed by the model"
            print(f"{name:12} {case['case']:50} {says}")
    written = {name: {"packages": list(LIBRARIES[name]), "cases": cases} for name, cases in made.items()}
    RESULTS.write_text(json.dumps({**known, **written}, indent=1) + "\n")
    return int(any(case["is_bound"] and not case["passed"] for cases in made.values() for case in cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
