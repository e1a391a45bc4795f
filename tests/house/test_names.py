"""Tests that backticked names in docs and docstrings exist, and that every page is listed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.house.named import FENCE, TICKED, docstrings, is_known, read_code
from tests.house.reader import ROOT, Module

pytestmark = pytest.mark.pure

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.md")])
LIBRARIES = ("F", "json", "numpy", "object", "prometheus_client", "random", "time", "torch", "vllm")
"""First parts of dotted names that are other projects'."""
FOREIGN = frozenset(
    [
        *("finally", "None", "Protocol"),  # Python
        *("Allow", "Forwarded", "Origin"),  # HTTP
        *("org.cncf.model.filepath", "org.opencontainers.image.title"),  # ModelPack, OCI
        *("client_max_body_size", "health_check", "least_conn", "worker_connections"),  # nginx, HAProxy
        *("SSL_CERT_FILE",),  # OpenSSL
        *("default.headrace_usage",),  # a table in ClickHouse
        *("CapabilityBoundingSet",),  # systemd
        *("cpu_gemm_wna16", "int8_asym"),  # vLLM, OpenVINO
        *("mark_control_tokens", "modeling_rope_utils"),  # transformers
        *(
            "libtorch_cpu.so",
            "model.safetensors",
            "model.safetensors.index.json",
            "generation_config.json",
            "ca.crt",
            "tls.crt",
        ),  # files of others
        *("num_x", "max_x", "x_id", "a_to_b", "_ms"),  # patterns of names
    ]
)
"""Names that are not this project's; a library's module stands in LIBRARIES."""


def mentions(house: dict[str, Module]) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        shown = str(page.relative_to(ROOT))
        yield from ((shown, name) for name in TICKED.findall(FENCE.sub("", page.read_text(encoding="utf-8"))))
    for module in house.values():
        shown = module.shown_path
        yield from ((f"{shown}:{line}", name) for line, text in docstrings(module.tree) for name in TICKED.findall(text))


def test_backticked_names_exist(house: dict[str, Module]) -> None:
    """A name that is another project's goes into FOREIGN; anything else has to be named as the code names it."""
    code = read_code()
    missing: dict[str, list[str]] = defaultdict(list)
    for place, name in mentions(house):
        known = name in FOREIGN or name.partition(".")[0] in LIBRARIES
        if not known and not is_known(name, code):
            missing[name].append(place)
    assert not missing, "\n".join(f"`{name}` is nowhere in the code: {', '.join(places[:3])}" for name, places in sorted(missing.items()))


def test_the_documentations_front_page_lists_every_page() -> None:
    front = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| \[(\w+\.md)\]\(\1\) \|", front, re.MULTILINE))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
