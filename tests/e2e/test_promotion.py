"""Promotes versions of a model to a deployment of real processes while streams run: no answer is of two versions, a bad one comes back."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from http_kit import COMPLETIONS, Answer, stream
from safetensors.torch import load_file, save_file
from server_kit import COMMAND, SOURCE, Server, serving

from headrace.cli.admin.client import AdminClient
from headrace.machine.cache_folder import cache_root
from headrace.registry.remote import Registry

pytestmark = pytest.mark.process

PROMPTS = ("Story of a", "The river", "He said", "One day")
ENGINE = {"dtype": "float32", "num_threads": 1}
NUM_TOKENS = 12


def version(folder: Path, source: Path, *, noise: float = 0.0, is_broken: bool = False) -> Path:
    """The bundled model with other weights. Those of a broken one are finite, and its logits are not."""
    shutil.copytree(source, folder)
    [file] = folder.glob("*.safetensors")
    draw = torch.Generator().manual_seed(3)
    weights = {name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=draw) for name, tensor in load_file(file).items()}
    if is_broken:
        weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def registry(trained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """Of fox: 1, which is stable, 2 with other weights, and 3, whose every answer fails."""
    parent = tmp_path_factory.mktemp("promotion")
    made = Registry(f"file://{parent}/registry", may_make=True)
    made.push(trained_folder, "fox", "1")
    made.push(version(parent / "2", trained_folder, noise=0.7), "fox", "2")
    made.push(version(parent / "3", trained_folder, is_broken=True), "fox", "3")
    made.set_alias("fox", "stable", "1")
    return made


@pytest.fixture(scope="module")
def site(registry: Registry) -> Iterator[Server]:
    cache = Path(f"{registry.url.removeprefix('file://')}-cache")
    cache.mkdir(0o700)
    if (compiled := cache_root(os.environ) / "numba").is_dir():
        shutil.copytree(compiled, cache / "numba")  # versions of a test stay out of this user's cache, and kernels are compiled once
    engine = {**ENGINE, "num_kv_blocks": 200, "deterministic": True, "model": f"{registry.url}/fox:stable"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE_DIR", str(cache))
        with serving({"models": [{"name": "fox", "engine": engine}], "gateway": {"request_log": "off"}}) as server:
            yield server


def promote(site: Server, registry: Registry, number: str) -> subprocess.CompletedProcess[str]:
    command = [COMMAND[0], "registry", "promote", f"{registry.url}/fox:{number}", "stable", "--rollout", "fox", "--run-dir"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([*command, str(site.run_dir)], capture_output=True, text=True, env=environment, check=False)


async def one(site: Server, prompt: str) -> Answer:
    return await stream(site.port, COMPLETIONS, {"model": "fox", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0})


async def texts(site: Server) -> dict[str, str]:
    """What each prompt is answered with now, by one version."""
    found = {prompt: await one(site, prompt) for prompt in PROMPTS}
    assert all(answer.is_done and answer.error is None for answer in found.values()), found
    return {prompt: answer.text[0] for prompt, answer in found.items()}


@asynccontextmanager
async def streams_run(site: Server) -> AsyncIterator[Callable[[], list[tuple[str, Answer]]]]:
    found: list[tuple[str, Answer]] = []
    is_over = asyncio.Event()

    async def client(prompt: str) -> None:
        while not is_over.is_set():
            found.append((prompt, await one(site, prompt)))

    clients = [asyncio.create_task(client(prompt)) for prompt in PROMPTS]
    try:
        yield lambda: found
        is_over.set()
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def fox(site: Server) -> dict[str, Any]:
    status = await asyncio.to_thread(AdminClient(site.run_dir).status)
    [model] = status["models"]
    return dict(model)


async def test_streams_go_through_a_promotion_and_each_is_of_one_version(site: Server, registry: Registry) -> None:
    """An engine of the version before dies while the canary serves: its streams go on at itself, started again, and not at the canary."""
    before = await texts(site)
    async with streams_run(site) as found:
        promotion = asyncio.create_task(asyncio.to_thread(promote, site, registry, "2"))
        while (await fox(site))["canary"] is None:
            assert not promotion.done(), await promotion
            await asyncio.sleep(0.05)
        assert registry.aliases("fox")["stable"] == "1", "it moves once the version serves"
        [old] = [replica for replica in (await fox(site))["replicas"] if replica["revision"] == 0]
        os.kill(old["pids"][0], signal.SIGKILL)
        ended = await promotion
        num_during = len(found())
    assert (ended.returncode, "the rollout goes on after fox-1" in ended.stdout) == (0, True), ended
    assert (registry.aliases("fox")["stable"], (await fox(site))["version"]) == ("2", "2")
    after = await texts(site)
    assert not set(before.values()) & set(after.values())
    seen: Counter[str] = Counter()
    for prompt, answer in found():
        assert answer.error is None, answer
        assert answer.text[0] in (before[prompt], after[prompt]), "of one version, from its first token to its last"
        seen["before" if answer.text[0] == before[prompt] else "after"] += 1
    assert min(seen["before"], seen["after"], num_during) > 0, seen


async def test_a_bad_version_is_rolled_back_and_its_alias_does_not_move(site: Server, registry: Registry) -> None:
    before, [served] = await texts(site), (await fox(site))["replicas"]
    async with streams_run(site) as found:
        ended = await asyncio.to_thread(promote, site, registry, "3")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "headrace: stable was not moved"), ended
    assert "is rolled back" in ended.stderr
    assert "requests failed" in ended.stderr
    assert (registry.aliases("fox")["stable"], (await fox(site))["version"]) == ("2", "2")
    [left] = (await fox(site))["replicas"]
    assert (left["name"], left["pids"]) == (served["name"], served["pids"]), "it was not touched"
    for prompt, answer in found():
        assert answer.text[0] == (before[prompt] if answer.error is None else "")
    assert await texts(site) == before
