"""Backticked names in docs and docstrings exist, every page and experiment is listed, and results name commits that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.house.named import FENCE, TICKED, docstrings, is_known, read_code
from tests.house.reader import ROOT, Module

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.md")])
LIBRARIES = ("F", "json", "numpy", "object", "prometheus_client", "random", "time", "torch", "vllm")
"""First parts of dotted names that are other projects'."""
FOREIGN = frozenset(
    [
        *("BaseHTTPMiddleware", "RequestResponseCycle.send", "StreamingResponse"),  # Starlette, uvicorn
        *("PyThreadState_SetAsyncExc", "__array_interface__", "attrgetter", "finally", "None", "Protocol"),  # Python, NumPy
        *("Allow", "Forwarded", "Origin"),  # HTTP
        *("client_max_body_size", "health_check", "least_conn", "maxconn", "worker_connections"),  # nginx, HAProxy
        *("SSL_CERT_FILE",),  # OpenSSL
        *("CapabilityBoundingSet", "MemoryDenyWriteExecute"),  # systemd
        *("cpu_gemm_wna16", "int8_asym", "onednn_mm", "raw_logprobs"),  # vLLM, OpenVINO
        *("mark_control_tokens", "modeling_rope_utils", "render_jinja_template"),  # transformers
        *(
            "libtorch_cpu.so",
            "model.safetensors",
            "model.safetensors.index.json",
            "generation_config.json",
            "ca.crt",
            "tls.crt",
        ),  # files of others
        *("perf", "prefetchnta", "vpaddd", "vpaddw"),  # Linux, x86
        *("num_x", "max_x", "x_id", "a_to_b", "_ms"),  # patterns of names
    ]
)
"""Names that are not this project's; a library's module stands in LIBRARIES."""
OF_THEIR_TIME = {"docs/experiments.md": frozenset({"may_grow"})}
"""Names that a dated entry may keep although the code lost them."""


def mentions(house: dict[str, Module]) -> Iterator[tuple[str, str, str]]:
    """(page or module, place, name) of everything between backticks."""
    for page in PAGES:
        shown = str(page.relative_to(ROOT))
        yield from ((shown, shown, name) for name in TICKED.findall(FENCE.sub("", page.read_text(encoding="utf-8"))))
    for module in house.values():
        shown = module.shown_path
        yield from ((shown, f"{shown}:{line}", name) for line, text in docstrings(module.tree) for name in TICKED.findall(text))


def test_backticked_names_exist(house: dict[str, Module]) -> None:
    """A name that is another project's goes into FOREIGN; anything else has to be named as the code names it."""
    code = read_code()
    missing: dict[str, list[str]] = defaultdict(list)
    for page, place, name in mentions(house):
        known = name in FOREIGN or name.partition(".")[0] in LIBRARIES or name in OF_THEIR_TIME.get(page, ())
        if not known and not is_known(name, code):
            missing[name].append(place)
    assert not missing, "\n".join(f"`{name}` is nowhere in the code: {', '.join(places[:3])}" for name, places in sorted(missing.items()))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("gateway.app", True),
        ("gateway.server", False),
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


def test_the_documentations_front_page_lists_every_page() -> None:
    front = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| \[(\w+\.md)\]\(\1\) \|", front, re.MULTILINE))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_every_experiment_is_in_the_index_once() -> None:
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    index, _, entries = text.partition("\n## Index\n")[2].partition("\n## ")
    linked = re.findall(r"^\| \[[^\]]+\]\(#([^)]+)\) \|", index, re.MULTILINE)
    titles = re.findall(r"^### (.+)$", entries, re.MULTILINE)
    wanted = [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]
    assert sorted(linked) == sorted(wanted), "add a row to the index of docs/experiments.md: question, verdict, gain, commit, JSON"


def test_the_index_names_commits_that_recorded_an_experiment() -> None:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False)
    if shallow.stdout.strip() != "false":
        pytest.skip("no history here to look commits up in")
    index = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8").partition("\n## Index\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"\| ([0-9a-f]{7,40}) \|", index))
    history = [*git, "log", "--format=%H", "--", "docs/experiments.md"]
    touched = subprocess.run(history, capture_output=True, text=True, check=True).stdout.split()
    assert named
    assert not [commit for commit in sorted(named) if not any(full.startswith(commit) for full in touched)]


def test_commits_of_results_exist_or_say_why_not() -> None:
    """A result measured on a commit outside the history of HEAD carries a `commit_note`; a rebased commit stays as an object."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False)
    if shallow.stdout.strip() != "false":
        pytest.skip("no history here to look commits up in")
    named: dict[str, str] = {}
    for file in sorted((ROOT / "bench" / "results").rglob("*.json")):
        found = json.loads(file.read_bytes())
        environment = found.get("environment", found) if isinstance(found, dict) else {}
        commit = re.match(r"[0-9a-f]{7,40}", str(environment.get("commit") or ""))
        if commit and "commit_note" not in environment:
            named.setdefault(commit.group(), str(file.relative_to(ROOT)))
    history = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True).stdout.split()
    missing = [commit for commit in named if not any(full.startswith(commit) for full in history)]
    assert not missing, [f"{commit} in {named[commit]}" for commit in missing]
