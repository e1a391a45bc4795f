"""Tests what the Dockerfile promises, by its text: `bench.image` tries the image."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch

import pytest
from helm_kit import merged, pod_of, rendered

from headrace.gateway.surfaces.routes import ENDPOINTS
from tests.house.reader import ROOT
from tools.lock_image import EXTRAS

pytestmark = pytest.mark.pure

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SECRET = re.compile(r"(?i)(secret|token|passw|api_?key|credential)")


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    rest: str


def stages() -> list[list[Instruction]]:
    """Instructions of each stage, its FROM first."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    made: list[list[Instruction]] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            if word == "FROM":
                made.append([])
            made[-1].append(Instruction(word, rest))
    return made


def of(word: str, stage: int = -1) -> list[str]:
    return [each.rest for each in stages()[stage] if each.word == word]


def test_bases_have_a_version_on_which_the_tests_run() -> None:
    bases = {stage[0].rest.split()[0] for stage in stages()}
    [base] = bases
    version = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", base)
    assert version is not None
    assert PROJECT["project"]["requires-python"] == f">={version[1]}"


def test_it_runs_as_the_user_of_the_chart_and_that_user_owns_no_program() -> None:
    container, pod = pod_of(rendered({}))["containers"][0], pod_of(rendered({}))["securityContext"]
    assert of("USER") == [f"{pod['runAsUser']}:{pod['runAsGroup']}"]
    words = [each.word for each in stages()[-1]]
    assert not {"RUN", "COPY", "ADD"} & set(words[words.index("USER") :])
    assert not [rest for rest in of("COPY") if "--chown" in rest]
    assert json.loads(of("ENTRYPOINT")[0])[-1] == "headrace"
    assert json.loads(of("CMD")[0]) == container["args"]
    assert of("EXPOSE") == [str(merged({})["config"]["gateway"]["port"])]


def test_its_health_is_a_probe_of_the_gateway() -> None:
    [check] = of("HEALTHCHECK")
    found = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert found is not None
    assert found[1] == of("EXPOSE")[0]
    assert found[2] in {endpoint.path for endpoint in ENDPOINTS if endpoint.is_probe}


def test_what_is_installed_has_a_hash_and_the_version_of_the_constraints() -> None:
    installs = [rest for rest in of("RUN", 0) if "pip install" in rest]
    assert all("--no-deps" in rest for rest in installs)
    assert [rest for rest in installs if "--require-hashes" not in rest] == ["pip install --no-deps --no-build-isolation ."]
    constraints = versions("constraints.txt")
    needs = [
        *PROJECT["project"]["dependencies"],
        *(each for extra in (*EXTRAS, "ray") for each in PROJECT["project"]["optional-dependencies"][extra]),
    ]
    for torch in ("cpu", "gpu"):
        installed = {
            name: version
            for file in ("requirements", "ray", f"torch-{torch}")
            for name, version in versions(f"deploy/docker/{file}.txt").items()
        }
        assert not {name: version for name, version in installed.items() if constraints.get(name, version) != version}
        missing = [name for need in needs if (name := plain(re.split(r"[^\w.-]", need)[0])) not in installed]
        assert not missing, "run tools/lock_image.py"


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(file: str) -> dict[str, str]:
    """Where it has hashes, each package has one."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.findall(r"^([\w.-]+)==(\S+)(.*(?:\n .*)*)", text, flags=re.MULTILINE)
    assert len({"--hash=sha256:" in rest for _, _, rest in found}) == 1, file
    return {plain(name): version for name, version, _ in found}


def test_no_secret_and_no_file_from_elsewhere_comes_in() -> None:
    every = [each for stage in stages() for each in stage]
    assert not [each for each in every if each.word == "ADD"]
    assert not [each for each in every if each.word in ("ARG", "ENV", "COPY", "LABEL") and SECRET.search(each.rest)]
    rules = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*", "what is not named stays outside"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {source for rest in of("COPY", 0) for source in rest.split()[:-1]}
    assert copied == allowed
    assert not [name for name in allowed if fnmatch(name, "*.env") or not (ROOT / name).exists()]
