"""The offline path runs with torch, numpy, tokenizers and numba alone; a child process blocks everything else.

Also: `import headrace` pulls nothing in.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.stand_in import stand_in

OFFLINE = ["torch", "numpy", "tokenizers", "numba", "llvmlite"]
TORCH_NEEDS = ["sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "typing_extensions", "functorch", "torchgen"]
NOT_LOADED = {"transformers", "jinja2", "headrace.gateway", "headrace.wire", "headrace.observe"}
"""What answering a prompt has no use for."""


BLOCKER = """
import sys
from importlib.abc import MetaPathFinder

ALLOWED = set(sys.argv[1].split(",")) | set(sys.stdlib_module_names) | {"headrace", "__main__"}


class Gate(MetaPathFinder):
    # Stands before the real finders and asks them only for what is allowed: everything else looks as if it were not installed.
    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, fullname, path=None, target=None):
        top = fullname.partition(".")[0]
        if top in ALLOWED or top.startswith("__editable__"):
            for finder in self.finders:
                if (spec := finder.find_spec(fullname, path, target)) is not None:
                    return spec
        return None

    def find_distributions(self, *context):
        for finder in self.finders:
            yield from getattr(finder, "find_distributions", lambda *_: ())(*context)


sys.meta_path[:] = [Gate(list(sys.meta_path))]
"""

CONTROL = """
import pkgutil, headrace.core, headrace.policy, headrace.engine.loop as loop
for package in (headrace.core, headrace.policy, *([loop] if hasattr(loop, "__path__") else [])):
    for entry in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(entry.name)
assert "torch" not in sys.modules and "numpy" not in sys.modules, "the control side must not know tensors"
"""

OPEN = """
from headrace import LLM, SamplingParams
options = {"model": sys.argv[2], "load_format": sys.argv[3]} if len(sys.argv) > 2 else {}
with LLM(num_threads=1, max_model_len=256, **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=4)
"""
GENERATE = f"""{OPEN}
    (answer,) = llm.generate(["What is the capital of France?"], params)
    assert len(answer.outputs[0].token_ids) >= 1, answer
assert not {NOT_LOADED!r} & set(sys.modules), sorted({NOT_LOADED!r} & set(sys.modules))
"""
ASK = f"""{OPEN}
    (answer,) = llm.chat([{{"role": "user", "content": "What is the capital of France?"}}], params)
    assert len(answer.outputs[0].token_ids) >= 1, answer
"""


def run_blocked(code: str, allowed: list[str], arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in which only the standard library, headrace and `allowed` can be imported."""
    command = [sys.executable, "-c", BLOCKER + code, ",".join(allowed), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_blocker_blocks() -> None:
    done = run_blocked("import msgspec", OFFLINE)
    assert done.returncode != 0
    assert "No module named 'msgspec'" in done.stderr


def test_control_side_imports_nothing_of_other_people() -> None:
    done = run_blocked(CONTROL, [])
    assert done.returncode == 0, done.stderr


def test_tensors_import_with_the_offline_list_alone() -> None:
    code = "import pkgutil, headrace.tensor as t\nfor e in pkgutil.walk_packages(t.__path__, 'headrace.tensor.'):\n    __import__(e.name)"
    done = run_blocked(code, OFFLINE + TORCH_NEEDS)
    assert done.returncode == 0, done.stderr


def test_generate_runs_with_the_offline_list_alone(tmp_path: Path) -> None:
    done = run_blocked(GENERATE, OFFLINE + TORCH_NEEDS, stand_in(tmp_path) or ())
    assert done.returncode == 0, done.stderr


def test_chat_runs_with_the_offline_list_alone(tmp_path: Path) -> None:
    done = run_blocked(ASK, OFFLINE + TORCH_NEEDS, stand_in(tmp_path) or ())
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
