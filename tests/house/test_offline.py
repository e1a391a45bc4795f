"""The offline path runs with torch, numpy, safetensors, tokenizers and numba alone; a child process blocks everything else.

Also: `import headrace` pulls nothing in.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OFFLINE = ["torch", "numpy", "safetensors", "tokenizers", "numba", "llvmlite"]
TORCH_NEEDS = ["sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "typing_extensions", "functorch", "torchgen"]
CHAT = ["transformers", "regex", "tqdm", "yaml", "packaging", "huggingface_hub"]
"""What transformers needs for a chat template, loaded lazily by `LLM.chat` only."""

BLOCKER = """
import sys
from importlib.abc import MetaPathFinder

ALLOWED = set(sys.argv[1].split(",")) | set(sys.stdlib_module_names) | {"headrace", "__main__"}
BLOCKED = set()


class Blocker(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        top = fullname.partition(".")[0]
        if top in ALLOWED or top.startswith(("_distutils", "__editable__")):
            return None
        BLOCKED.add(top)
        raise ModuleNotFoundError(f"No module named {top!r} (blocked)", name=top)


sys.meta_path.insert(0, Blocker())
"""

CONTROL = """
import pkgutil, headrace.core, headrace.policy, headrace.engine.loop as loop
for package in (headrace.core, headrace.policy, *([loop] if hasattr(loop, "__path__") else [])):
    for entry in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(entry.name)
assert "torch" not in sys.modules and "numpy" not in sys.modules, "the control side must not know tensors"
"""

GENERATE = """
from headrace import LLM, SamplingParams
with LLM() as llm:
    (answer,) = llm.generate(["What is the capital of France?"], SamplingParams(temperature=0, max_tokens=4))
    assert len(answer.outputs[0].token_ids) >= 1, answer
"""


def run_blocked(code: str, allowed: list[str], *, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in which only the standard library, headrace and `allowed` can be imported."""
    command = [sys.executable, "-c", BLOCKER + code, ",".join(allowed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_blocker_blocks() -> None:
    done = run_blocked("import msgspec", OFFLINE)
    assert done.returncode != 0
    assert "blocked" in done.stderr


def test_control_side_imports_nothing_of_other_people() -> None:
    done = run_blocked(CONTROL, [])
    assert done.returncode == 0, done.stderr


def test_tensors_import_with_the_offline_list_alone() -> None:
    code = "import pkgutil, headrace.tensor as t\nfor e in pkgutil.walk_packages(t.__path__, 'headrace.tensor.'):\n    __import__(e.name)"
    done = run_blocked(code, OFFLINE + TORCH_NEEDS)
    assert done.returncode == 0, done.stderr


def test_generate_runs_with_the_offline_list_alone() -> None:
    done = run_blocked(GENERATE, OFFLINE + TORCH_NEEDS)
    assert done.returncode == 0, done.stderr


def test_importing_headrace_pulls_nothing_in() -> None:
    code = "import sys; before = set(sys.modules); import headrace; import json; print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = [name for name in json.loads(done.stdout) if not name.startswith("json")]
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == ["headrace"], loaded


def test_door_exports_lead_somewhere() -> None:
    import headrace

    assert headrace.SamplingParams.__name__ == "SamplingParams"
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        headrace.Missing  # noqa: B018
    assert Path(headrace.__file__ or "").name == "__init__.py"
