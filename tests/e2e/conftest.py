"""Provides checkpoints and their plain loops, and the servers that several files share, once per session.

Each process that runs tests starts a session's server once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from plain_loop import Checkpoint, PlainLoop, save_random_llama
from real_engine import ROOMY
from server_kit import CROWD, CROWD_ENGINE, KEY, STEP_S, TENANTS, Server, key_of, serving, serving_fake

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.text.folder import load_text


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads and lose much to waiting for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("e2e") / "random-llama")


@pytest.fixture(scope="session")
def trained_folder() -> Path:
    folder = bundled_path(DEFAULT_MODEL)
    assert folder is not None
    return folder


@pytest.fixture(scope="session")
def random_checkpoint(random_folder: Path) -> Checkpoint:
    draw = random.Random(7)
    common = [draw.randrange(3, 330) for _ in range(21)]
    lengths = (1, 3, 8, 16, 17, 26, 33, 40)
    prompts = [[*common[: draw.randrange(22)], *(draw.randrange(3, 330) for _ in range(length))][-length:] for length in lengths]
    prompts += [[*common, *(draw.randrange(3, 330) for _ in range(length))] for length in (1, 5)]
    return _checkpoint("random", random_folder, [tuple(prompt) for prompt in prompts])


QUESTIONS = (
    "Hello!",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is 7 plus 5?",
    "What is a KV cache?",
    "Repeat after me: red green blue",
    "Sort these numbers: 5 3 9 1",
    "What is continuous batching, and why does it help when many people ask at the same time?",
)


@pytest.fixture(scope="session")
def trained_checkpoint(trained_folder: Path) -> Checkpoint:
    text = load_text(trained_folder)
    asked = [text.template.encode(text.tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    return _checkpoint("trained", trained_folder, [tuple(ids) for ids in asked])


def _checkpoint(name: str, folder: Path, prompts: list[tuple[int, ...]]) -> Checkpoint:
    text = load_text(folder)
    text.template.compile()
    return Checkpoint(name, folder, PlainLoop(folder), text, tuple(prompts))


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """Indirect: "random" or "trained"."""
    found: Checkpoint = request.getfixturevalue(f"{request.param}_checkpoint")
    return found


ENGINE: dict[str, object] = {"dtype": "float32", "kernels": ROOMY["kernels"], "num_threads": 1}


@pytest.fixture(scope="session")
def server(random_folder: Path) -> Iterator[Server]:
    """`headrace serve` of the random model as "random" (and "alias"): one replica, keys, KV memory for 752 tokens."""
    config = {
        "models": [{"name": "random", "aliases": ["alias"], "engine": {**ENGINE, "model": str(random_folder), "num_kv_blocks": 48}}],
        "gateway": {
            "api_keys": [
                {"key": KEY, "tenant": "operator"},
                {"key": key_of("reader"), "tenant": "operator", "role": "reader"},
                *({"key": key_of(tenant), "tenant": tenant} for tenant in TENANTS),
            ],
            "request_log": "{folder}/requests.jsonl",
        },
    }
    with serving(config) as server:
        server.metrics_key = key_of("reader")
        yield server


@pytest.fixture(scope="session")
def pair(trained_folder: Path) -> Iterator[Server]:
    """Two replicas of the bundled model as "pair", with overlapped steps and the fair queue, whose streams may move. It asks for no key."""
    options = {"num_kv_blocks": 400, "depth": 2, "queue_policy": "fair", "max_num_batched_tokens": 101, "deterministic": True}
    engine = {**ENGINE, "model": str(trained_folder), **options}
    with serving({"models": [{"name": "pair", "replicas": 2, "engine": engine}], "gateway": {"request_log": "off"}}) as server:
        yield server


@pytest.fixture(scope="module")
def ranked_pair(trained_folder: Path) -> Iterator[Server]:
    """Two replicas of the bundled model as "pair", each divided over two ranks."""
    engine = {**ENGINE, "model": str(trained_folder), "num_kv_blocks": 400, "deterministic": True, "tensor_parallel_size": 2}
    with serving({"models": [{"name": "pair", "replicas": 2, "engine": engine}], "gateway": {"request_log": "off"}}) as server:
        yield server


@pytest.fixture(scope="session")
def fake_server(random_folder: Path) -> Iterator[Server]:
    """The same deployment with an engine that computes nothing: any number of sequences, a token each every 20 ms, no failover."""
    gateway = {"timeouts": {"failover_s": 0}}
    with serving_fake(random_folder, fake={**CROWD, "step_seconds": STEP_S}, engine=CROWD_ENGINE, gateway=gateway) as server:
        yield server
