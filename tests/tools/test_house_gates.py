"""Tests that the gates of tests/house find what they are for: planted imports, calls, words and names, one of each kind."""

from __future__ import annotations

import ast

import pytest

from tests.house.floors import floor_of
from tests.house.named import is_known, read_code
from tests.house.reader import find_cycles, read_source
from tests.house.test_floors import _verdict
from tests.house.test_forbidden import find_forbidden
from tests.house.test_words import find_private_words

pytestmark = pytest.mark.pure


def test_reader_sees_imports_wherever_they_stand() -> None:
    text = (
        "import a.b\nfrom . import c\nfrom .d import e\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import f\n"
        "def late():\n    import g\n    __import__('h')\n    importlib.import_module('i.j')\n"
        "class K:\n    def m(self):\n        from ..l import x\n"
    )
    found = {entry.target: entry for entry in read_source(text, "p.q.r", frozenset({"p.q.c"}))}
    assert set(found) == {"a.b", "p.q.c", "p.q.d", "typing", "f", "g", "h", "i.j", "p.l"}
    assert [name for name, entry in found.items() if entry.is_lazy] == ["g", "h", "i.j", "p.l"]
    assert [name for name, entry in found.items() if entry.is_typing] == ["f"]


def test_floors_refuse_planted_imports() -> None:
    planted = [
        ("headrace.core.ids", "import torch"),
        ("headrace.policy.queues", "def late():\n    import time"),
        ("headrace.policy.queues", "from headrace.tensor import batch"),
        ("headrace.engine.loop", "def late():\n    import numpy"),
        ("headrace.engine.loop", "from headrace.wire import codec"),
        ("headrace.text.templates", "import jinja2"),
        ("headrace.text.templates", "def late():\n    import transformers"),
        ("headrace.tensor.kernels.numba_attention", "from headrace.tensor.models import llama"),
        ("headrace.tensor.models.llama", "from headrace.engine import config"),
        ("headrace.gateway.app", "import torch"),
        ("headrace.gateway.app", "from headrace.engine.config import EngineConfig"),
        ("headrace.lab.loadgen", "import torch"),
        ("headrace", "from headrace.llm import LLM"),
    ]
    for module, text in planted:
        row, floor = floor_of(module)
        (found,) = read_source(text, module)
        assert _verdict(module, row, floor, found), f"{module}: {text!r} should be refused"
    assert _verdict("headrace.text.templates", *floor_of("headrace.text"), read_source("def f():\n import jinja2", "x")[0]) is None


def test_cycles_are_found() -> None:
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(text, shell=True)",
        "numpy.load(path, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_gate_catches(text: str) -> None:
    assert list(find_forbidden(ast.parse(text)))


def test_gate_lets_ordinary_names_pass() -> None:
    text = "model.eval()\nre.compile('x')\nyaml.safe_load(text)\nsafetensors.torch.load_file(path)\nsubprocess.run(['a'])"
    assert not list(find_forbidden(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        '"""Those that wait."""',
        'BUDGET = 8\n"""So many tokens go first."""',
        'x = 1\n"""Of a step."""',
        "# freed blocks are in limbo",
        "# the request that nobody reads",
    ],
)
def test_private_word_is_found(text: str) -> None:
    assert list(find_private_words(text, ast.parse(text)))


def test_field_words_pass() -> None:
    text = '"""Offsets of a step\'s rows."""\nLANES = 16\n# one SIMD lane per column; a newsletter, a storyteller\n'
    assert not list(find_private_words(text, ast.parse(text)))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("gateway.app", True),
        ("gateway.nothing", False),
        ("planner.py", True),
        ("gateway/nowhere.py", False),
        ("Plan.move_kinds", True),
        ("Plan.no_such_column", False),
        ("launch.no_such_function", False),
        ("scheduler.commit", True),
        ("SequenceTable", True),
        ("Roster", False),
        ("--port 8000", True),
    ],
)
def test_a_name_is_resolved_as_its_form_asks(name: str, known: bool) -> None:
    assert is_known(name, read_code()) is known
