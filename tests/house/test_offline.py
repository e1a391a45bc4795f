"""Tests that the offline path runs with torch, numpy, tokenizers and numba alone, and that `import headrace` imports nothing else.

A child process blocks every other package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

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
before = set(sys.modules)
import headrace
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert loaded - set(sys.stdlib_module_names) == {"headrace"}, loaded
assert not [name for name in sys.modules if name.startswith("headrace.")], "importing the package imports nothing else"

import pkgutil, headrace.core, headrace.policy, headrace.engine.loop as loop
for package in (headrace.core, headrace.policy, *([loop] if hasattr(loop, "__path__") else [])):
    for entry in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(entry.name)
assert "torch" not in sys.modules and "numpy" not in sys.modules, "the control side must not know tensors"
try:
    import msgspec
except ModuleNotFoundError as error:
    print(error)
"""

ANSWERS = f"""
from headrace import LLM, SamplingParams
with LLM(num_threads=1, max_model_len=256) as llm:
    params = SamplingParams(temperature=0, max_tokens=4)
    (answer,) = llm.generate(["What is the capital of France?"], params)
    assert len(answer.outputs[0].token_ids) >= 1, answer
    needless = {NOT_LOADED!r} & set(sys.modules)
    assert not needless, sorted(needless)
    (answer,) = llm.chat([{{"role": "user", "content": "What is the capital of France?"}}], params)
    assert len(answer.outputs[0].token_ids) >= 1, answer
import pkgutil, headrace.tensor
for entry in pkgutil.walk_packages(headrace.tensor.__path__, "headrace.tensor."):
    if not entry.name.startswith("headrace.tensor.kernels.gpu."):  # they need triton, which torch brings where there is a GPU
        __import__(entry.name)
"""


def run_blocked(code: str, allowed: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in which only the standard library, headrace and `allowed` can be imported."""
    command = [sys.executable, "-c", BLOCKER + code, ",".join(allowed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_importing_headrace_pulls_nothing_in_and_the_control_side_nothing_of_other_people() -> None:
    """That the blocker blocks is shown at the end of its program."""
    done = run_blocked(CONTROL, [])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "No module named 'msgspec'\n"


def test_answers_and_every_module_of_tensors_need_the_offline_list_alone() -> None:
    """generate needs still less: it loads neither templates nor what serves."""
    done = run_blocked(ANSWERS, OFFLINE + TORCH_NEEDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.pure
def test_the_packages_exports_lead_somewhere() -> None:
    import headrace

    assert headrace.SamplingParams.__name__ == "SamplingParams"
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        headrace.Missing  # noqa: B018
    assert Path(headrace.__file__ or "").name == "__init__.py"
