"""What a replica's options may be, whoever gives them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", float("nan")),
        ("max_waiting", -3.0),
        ("block_size", "16"),
        ("block_size", True),
        ("depth", 1.5),
        ("max_num_seqs", 0),
    ],
)
def test_a_value_outside_its_bounds_or_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(model="m", **{name: value}).checked()
