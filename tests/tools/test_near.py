"""Tests choosing the tests that are near a change."""

from __future__ import annotations

import pytest

from tools.near import MANY, Near, near

pytestmark = pytest.mark.pure

FILES = {
    "tests/conftest.py": "",
    "tests/test_functions.py": "",
    "tests/core/test_plan.py": "from plan_kit import plans\n",
    "tests/core/test_plan_codec.py": "import pytest\n    import plan_kit\n",
    "tests/core/test_ids.py": "",
    "tests/gateway/conftest.py": "",
    "tests/gateway/test_app.py": "",
    "tests/gateway/limits/test_limiter.py": "from kit import one",
    "tests/support/kit.py": "from plan_kit import plans",
    "tests/support/plan_kit.py": "",
    "tests/tools/test_near.py": "",
}


def found(*changed: str) -> Near:
    return near(changed, FILES)


def test_a_source_file_has_its_mirrored_tests_first_and_then_those_beside_them() -> None:
    assert found("src/headrace/core/plan.py") == Near(
        ("tests/core/test_plan.py", "tests/core/test_plan_codec.py"), ("tests/core/test_ids.py",), ()
    )


def test_a_source_file_without_a_mirrored_folder_has_the_nearest_one_above() -> None:
    assert found("src/headrace/core/deep/er/thing.py").beside == tuple(name for name in sorted(FILES) if "/core/" in name)
    assert found("src/headrace/functions.py") == Near(("tests/test_functions.py",), (), ())
    assert found("src/headrace/other.py").unknown == ("src/headrace/other.py",), "not all tests of the project"


def test_folders_below_are_left_out_where_they_hold_many_tests() -> None:
    assert found("src/headrace/gateway/app.py") == Near(("tests/gateway/test_app.py",), ("tests/gateway/limits/test_limiter.py",), ())
    many = {f"tests/gateway/limits/test_{number}.py": "" for number in range(MANY)}
    assert near(["src/headrace/gateway/app.py"], FILES | many) == Near(("tests/gateway/test_app.py",), (), ())


def test_a_changed_test_is_run_itself_unless_it_is_gone() -> None:
    assert found("tests/core/test_ids.py", "tests/core/test_gone.py") == Near(("tests/core/test_ids.py",), (), ("tests/core/test_gone.py",))


def test_a_support_file_has_the_tests_that_import_it_by_others_too() -> None:
    assert found("tests/support/plan_kit.py").mirrored == (
        "tests/core/test_plan.py", "tests/core/test_plan_codec.py", "tests/gateway/limits/test_limiter.py"
    )  # fmt: skip
    assert found("tests/gateway/conftest.py").beside == ("tests/gateway/limits/test_limiter.py", "tests/gateway/test_app.py")
    assert found("tests/conftest.py").unknown == ("tests/conftest.py",)


def test_benchmarks_and_tools_have_their_own_tests_and_documents_none() -> None:
    assert found("bench/smoke/run.py", "tools/near.py", "docs/usage.md") == Near((), ("tests/tools/test_near.py",), ("docs/usage.md",))
