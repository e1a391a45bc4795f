"""Tests the rule for the names of functions that a model may call."""

from __future__ import annotations

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.tools import FunctionTool

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("name", ["f", "get_weather", "a-b", "A" * 64, "9"])
def test_a_name_that_every_format_can_write_is_taken(name: str) -> None:
    assert FunctionTool(name=name).checked().name == name


@pytest.mark.parametrize("name", ["", "a b", "a.b", 'a"', "f\n", "A" * 65, "fonction_é", "<|im_end|>"])
def test_a_name_that_would_need_escaping_is_refused_by_its_field(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[3\]\.function\.name: expected 1\.\.64 letters, digits, _ and -"):
        FunctionTool(name=name).checked(field="tools[3].function")
