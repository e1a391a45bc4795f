"""Provides vLLM's `LoRARequest`, and parses those of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.core.adapters import MAX_ADAPTERS
from headrace.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, for `LLM.generate` and `LLM.chat`. Its folder is read when its name is first used, and what changed in it since with
    load_inplace alone. An LLM takes at most `core.adapters.MAX_ADAPTERS` names.

    lora_int_id      one per adapter, >= 1
    lora_path        a folder as PEFT saves it, or the name of a bundled adapter
    base_model_name  a note of the caller's, as in vLLM

    Raises InvalidRequest.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    tensorizer_config_dict: None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field).strip():
                raise InvalidRequest(field, "a text that is not empty", getattr(self, field))
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise InvalidRequest("lora_int_id", "an integer >= 1", self.lora_int_id)
        if self.tensorizer_config_dict is not None:
            raise InvalidRequest("tensorizer_config_dict", "None", self.tensorizer_config_dict, "Save the adapter as safetensors.")
        if not isinstance(self.load_inplace, bool):
            raise InvalidRequest("load_inplace", "True or False", self.load_inplace)


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one per prompt; None: the base model."""


def parse_lora_requests(given: LoRARequests, count: int) -> list[LoRARequest | None]:
    """Raises InvalidRequest."""
    if not isinstance(given, LoRARequest | Sequence | None) or isinstance(given, str):
        raise InvalidRequest("lora_request", "a headrace.LoRARequest, or a list of them", type(given).__name__)
    requests = list(given) if isinstance(given, Sequence) else [given] * count
    if len(requests) != count:
        raise InvalidRequest("lora_request", f"one for all or one for each of the {count} prompts", len(requests))
    for each in requests:
        if not isinstance(each, LoRARequest | None):
            raise InvalidRequest("lora_request", "headrace.LoRARequest or None", type(each).__name__)
    return requests


def folders_to_read(known: Mapping[str, LoRARequest], asked: Iterable[LoRARequest]) -> dict[str, LoRARequest]:
    """By name, the requests whose folders are read before the call. Another path or id under a known name is refused: vLLM would answer
    with what it read first.

    Raises InvalidRequest.
    """
    named: dict[str, LoRARequest] = {}
    for one in asked:
        if named.setdefault(one.lora_name, one) != one:
            raise InvalidRequest("lora_request", "one LoRARequest per lora_name in a call", one.lora_name)
    new = {name: one for name, one in named.items() if one.load_inplace or name not in known}
    if not new and all(_is_same(one, known[name]) for name, one in named.items()):
        return new
    merged = {**known, **new}
    id_to_name: dict[int, str] = {}
    for name, one in {**merged, **named}.items():
        before = merged[name]
        if not _is_same(one, before):
            raise InvalidRequest(
                "lora_request",
                f"{before.lora_path!r} with the id {before.lora_int_id} for {name!r}, as when it was read",
                f"{one.lora_path} with the id {one.lora_int_id}",
                "Set load_inplace=True to replace it, or take another name.",
            )
        if id_to_name.setdefault(one.lora_int_id, name) != name:
            raise InvalidRequest("lora_int_id", f"an id of its own for {name!r}: {id_to_name[one.lora_int_id]!r} has it", one.lora_int_id)
    if len(merged) > MAX_ADAPTERS:
        remedy = "Set load_inplace=True to read another adapter under a known name, or make a new LLM."
        raise InvalidRequest("lora_request", f"at most {MAX_ADAPTERS} lora_names in the life of an LLM", len(merged), remedy)
    return new


def _is_same(one: LoRARequest, other: LoRARequest) -> bool:
    return (one.lora_path, one.lora_int_id) == (other.lora_path, other.lora_int_id)
