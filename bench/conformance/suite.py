"""Reads the official JSON Schema Test Suite out of the source distribution of the Python package `jsonschema`, which carries it.

The suite is fetched with pip into a cache folder, once, and is no part of this repository.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.machine.cache_folder import cache_root

VERSION = "4.26.0"
ARCHIVE = f"jsonschema-{VERSION}.tar.gz"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
"""Folder of the suite -> the value of `$schema`."""


@dataclass(frozen=True, slots=True)
class SuiteGroup:
    """One schema of the suite. values: each with the suite's own judgement"""

    draft: str
    file: str
    name: str
    schema: Any
    values: tuple[tuple[Any, bool], ...]

    @property
    def source(self) -> str:
        """The schema's text. Where it names no draft, that of its folder."""
        if not isinstance(self.schema, dict):
            return json.dumps(self.schema)
        return json.dumps({"$schema": DRAFTS[self.draft], **self.schema})


def fetch() -> Path:
    """The suite's folder of tests, downloaded at the first call. Raises SystemExit when the archive is not the expected one."""
    folder = cache_root(os.environ) / "json-schema-suite" / VERSION
    tests = folder / f"jsonschema-{VERSION}" / "json" / "tests"
    if tests.is_dir():
        return tests
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*pip, f"jsonschema=={VERSION}"], check=True)
    archive = folder / ARCHIVE
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{ARCHIVE}: its SHA-256 is {found}, expected {SHA256}")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return tests


def groups(tests: Path) -> Iterator[SuiteGroup]:
    """Every required test of the suite; the folder `optional` is left out."""
    for draft in DRAFTS:
        for file in sorted((tests / draft).glob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                values = tuple((test["data"], test["valid"]) for test in group["tests"])
                yield SuiteGroup(draft, file.stem, group["description"], group["schema"], values)
