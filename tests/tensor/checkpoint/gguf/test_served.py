"""Tests a GGUF file of the bundled model, from its path to tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gguf_files import bundled_gguf, dense
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.bundled import FOLDER
from headrace.cli.config.load import from_raw
from headrace.cli.config.sections import is_fetched
from headrace.core.errors import CheckpointError, ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.runner.build import build_runner
from headrace.fleet.weights import resolve_model
from headrace.machine.cache_folder import ENVIRONMENT
from headrace.tensor.checkpoint.gguf.folder import MAX_FOLDERS, NOTE, find_source, make_folder

pytestmark = pytest.mark.pure

TINY = FOLDER / "headrace-tiny"
PROMPTS = ["What is the capital of France?", "Once upon a time", "1, 2, 3,", "The weather"]


def greedy(model: Path, quantization: str = "none") -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(str(model), dtype="float32", kernels="reference", max_model_len=64, max_num_seqs=4, quantization=quantization) as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def dense_folder(tmp_path: Path, kind: str) -> Path:
    """The bundled model with the values that a file of this type stands for, as plain float32."""
    folder = tmp_path / f"dense-{kind}"
    folder.mkdir()
    for file in TINY.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(TINY / "model.safetensors")
    save_file({name: dense(tensor, kind).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_tokens_are_those_of_the_dense_weights(tmp_path: Path, kind: str) -> None:
    found = greedy(bundled_gguf(TINY, tmp_path / "tiny.gguf", kind), quantization="gguf")
    assert found == greedy(dense_folder(tmp_path, kind))
    assert len(set(found)) > 1


def test_a_start_says_how_the_file_is_stored(tmp_path: Path) -> None:
    path = bundled_gguf(TINY, tmp_path / "tiny.gguf", "Q8_0")
    config = EngineConfig(model=str(resolve_model(str(path))), kernels="reference", max_model_len=64, max_num_seqs=2)
    runner, info = build_runner(config)
    runner.close()
    assert "stored as gguf Q8_0" in info.decided[0]


def test_the_name_of_another_format_is_refused(tmp_path: Path) -> None:
    path = bundled_gguf(TINY, tmp_path / "tiny.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="'gptq', but the checkpoint is stored as gguf Q8_0"):
        greedy(path, quantization="gptq")
    with pytest.raises(ConfigError, match="'gguf', but the checkpoint holds plain weights"):
        greedy(TINY, quantization="gguf")


def test_linears_of_a_file_can_be_rounded_again(tmp_path: Path) -> None:
    assert len(greedy(bundled_gguf(TINY, tmp_path / "tiny.gguf", "Q8_0"), quantization="int8")) == len(PROMPTS)


def test_a_folder_is_made_once_and_again_when_the_file_is_another(tmp_path: Path, cache: Path) -> None:
    path = bundled_gguf(TINY, tmp_path / "tiny.gguf", "Q4_0")
    folder = resolve_model(str(path))
    assert folder.name == "tiny"
    assert folder.is_relative_to(cache)
    made = (folder / NOTE).stat().st_mtime_ns
    assert resolve_model(str(path)) == folder
    assert (folder / NOTE).stat().st_mtime_ns == made
    (folder / NOTE).unlink()  # what an incomplete folder lacks
    assert resolve_model(str(path)) == folder
    assert json.loads((folder / NOTE).read_text())["first"] == str(path)
    copied = tmp_path / "copy.gguf"
    copied.write_bytes(path.read_bytes())
    assert resolve_model(str(copied)) != folder
    assert resolve_model(str(bundled_gguf(TINY, path, "Q8_0"))) != folder
    assert not list(cache.rglob("*.unfinished"))


def test_no_more_folders_are_kept_than_a_few(tmp_path: Path, cache: Path) -> None:
    path = bundled_gguf(TINY, tmp_path / "tiny.gguf", "Q4_0")
    oldest = resolve_model(str(path)).parent
    os.utime(oldest, (1, 1))
    for number in range(MAX_FOLDERS):
        (oldest.parent / f"other-{number}").mkdir()
    resolve_model(str(bundled_gguf(TINY, path, "Q8_0")))
    assert not oldest.exists()
    assert len(list(oldest.parent.iterdir())) == MAX_FOLDERS


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path, cache: Path) -> None:
    path = bundled_gguf(TINY, tmp_path / "tiny.gguf", "Q4_0")
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match=f"may be written by others.*Set {ENVIRONMENT}"):
        resolve_model(str(path))


def test_a_path_that_is_no_file_of_this_kind_says_what_it_is(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none.gguf"), "none.gguf"):
        with pytest.raises(ConfigError, match=f"there is no file {name}"):
            resolve_model(name)
    (tmp_path / "text.gguf").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match=r"text.gguf: the header does not begin with GGUF"):
        resolve_model(str(tmp_path / "text.gguf"))


def test_a_configuration_names_a_file_and_serves_it_under_the_files_name(tmp_path: Path) -> None:
    path = bundled_gguf(TINY, tmp_path / "Tiny-Q4_0.gguf", "Q4_0")
    config = from_raw({"models": [{"engine": {"model": str(path), "quantization": "gguf"}}]})
    assert config.models[0].served_name == "Tiny-Q4_0"
    assert not is_fetched("none.gguf")
    [model] = config.fleet(resolve_model).models
    assert model.folder is not None
    assert (model.folder / "tokenizer.json").is_file()
    with pytest.raises(ConfigError, match=r"there is no file"):
        from_raw({"models": [{"engine": {"model": str(tmp_path / "none.gguf")}}]})


def test_a_path_that_is_no_utf8_has_a_folder(tmp_path: Path) -> None:
    plain = bundled_gguf(TINY, tmp_path / "plain.gguf", "Q8_0")
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.gguf"))
    plain.rename(file)
    folder = make_folder(file)
    assert find_source(folder).first == file
    (folder / "config.json").unlink()
    (folder / NOTE).unlink()
    assert (make_folder(file) / "config.json").is_file()  # in the place of one that is not complete
