"""The shipped dashboards are those of the table; `tests/e2e/test_prometheus.py` asks a real Prometheus each expression."""

from __future__ import annotations

import pytest

from tools.dashboards import files

pytestmark = pytest.mark.pure


def test_the_files_are_written_from_the_table() -> None:
    for path, content in files().items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python tools/dashboards.py"
