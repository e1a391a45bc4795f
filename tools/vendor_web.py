"""Fetches the web files we ship from npm, at pinned versions with pinned integrity, and keeps only what is served.

    python tools/vendor_web.py            # writes src/headrace/gateway/static/
    python tools/vendor_web.py --check    # compares what is there with the digests in static/VENDORED.json

Needs npm for the first form only. Nothing here runs when Headrace is built, installed or served.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

STATIC = Path(__file__).parents[1] / "src" / "headrace" / "gateway" / "static"
MANIFEST = "VENDORED.json"


@dataclass(frozen=True, slots=True)
class Package:
    """integrity: npm's `dist.integrity`. files: name in the package -> name served."""

    name: str
    version: str
    licence: str
    integrity: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "swagger-ui-dist",
        "5.35.0",
        "Apache-2.0",
        "sha512-U06rpMtW9V3XPGOBeamTUSr0Z09jMX4IJuANpE/EZbAhw0G8CgwrzU4YmXkn/h0wCDNsXdGarTNNHC3sU8yVUQ==",
        {
            "swagger-ui-bundle.js": "swagger-ui-bundle.js",
            "swagger-ui-bundle.js.LICENSE.txt": "swagger-ui-bundle.js.LICENSE.txt",
            "swagger-ui.css": "swagger-ui.css",
            "LICENSE": "swagger-ui.LICENSE",
            "NOTICE": "swagger-ui.NOTICE",
        },
    ),
)


def fetch(package: Package, folder: Path) -> Path:
    """The package's archive in `folder`. Raises SystemExit when its digest is not the pinned one."""
    subprocess.run(["npm", "pack", "--silent", f"{package.name}@{package.version}"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    archive = folder / f"{package.name}-{package.version}.tgz"
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != package.integrity:
        raise SystemExit(f"{package.name} {package.version}: integrity is {found}, expected {package.integrity}")
    return archive


def extract(package: Package, archive: Path) -> dict[str, str]:
    """Write the wanted files; returns their digests by served name."""
    digests: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for name, served in package.files.items():
            member = tar.extractfile(f"package/{name}")
            if member is None:
                raise SystemExit(f"{package.name}: no file {name}")
            data = member.read()
            (STATIC / served).write_bytes(data)
            digests[served] = hashlib.sha256(data).hexdigest()
    return digests


def vendor() -> None:
    STATIC.mkdir(parents=True, exist_ok=True)
    manifest = []
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            digests = extract(package, fetch(package, Path(folder)))
        manifest.append({"name": package.name, "version": package.version, "licence": package.licence, "sha256": digests})
    (STATIC / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def check() -> list[str]:
    """Served files whose content is not what the manifest says."""
    manifest = json.loads((STATIC / MANIFEST).read_text())
    wanted = {name: digest for package in manifest for name, digest in package["sha256"].items()}
    return [name for name, digest in wanted.items() if hashlib.sha256((STATIC / name).read_bytes()).hexdigest() != digest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the files with the manifest instead of fetching")
    if parser.parse_args().check:
        wrong = check()
        sys.exit(f"changed by hand: {', '.join(wrong)}" if wrong else 0)
    vendor()


if __name__ == "__main__":
    main()
