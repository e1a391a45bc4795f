"""Checks the names of models in a registry."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.registry.names import Reference, is_reference, read_reference

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("s3://bucket/a/llama-8b:2", Reference("s3://bucket/a", "llama-8b", "2")),
        ("s3://bucket/llama-8b", Reference("s3://bucket", "llama-8b", "latest")),
        ("gs://bucket/llama:stable", Reference("gs://bucket", "llama", "stable")),
        ("oci://host:5000/a/llama:1", Reference("oci://host:5000/a", "llama", "1")),
        (f"oci://[::1]:5000/llama@sha256:{'0f' * 32}", Reference("oci://[::1]:5000", "llama", f"sha256:{'0f' * 32}")),
        ("file:///srv/models/llama:1.2_a", Reference("file:///srv/models", "llama", "1.2_a")),
    ],
)
def test_a_reference_has_a_registry_a_name_and_a_tag(text: str, reference: Reference) -> None:
    assert is_reference(text)
    assert read_reference(text) == reference
    assert read_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/..:1", "s3://bucket/a:", "s3://bucket/.a:1", "s3://bucket/../a:1", "s3://a:1", "s3://bucket//x/a:1",
        "s3://bucket/a:1\n", "s3://bucket/a b:1", "file:///a", "http://host/a:1", "az://b/a:1", f"s3://bucket/{'a' * 97}:1", "s3://b/a:1:2",
        "oci://user:secret@host/a:1", "oci://host/A/b:1", "oci://host/b%2e/a:1", "oci://host?x/a:1", "oci://host/a@sha256:00", "oci://host",
        f"oci://host/a:1@sha256:{'0' * 64}", f"s3://bucket/a@sha256:{'0' * 64}", "oci:///a:1", "oci://host/a/../b:1", "oci://host:/a:1",
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_reference(text)


def test_paths_and_hub_ids_are_no_references() -> None:
    assert not any(map(is_reference, ("/srv/a", "org/model", "headrace-tiny", "./a:1", "s3:/a/b", "s4://a/b")))
