"""Does the work of a text worker, as pure functions from a job to its reply: `python -m headrace.gateway.text_host` is the workers' host.

Everything that can take long for a client's input is here: decoding large bodies, templates, tokenizing, decoding many ids.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.sampling import check_token_ids
from headrace.gateway.http.errors import UnsupportedMediaType
from headrace.gateway.http.json_border import decode_object
from headrace.gateway.surfaces.endpoint import BodyParser, Endpoint
from headrace.gateway.surfaces.routes import ENDPOINTS
from headrace.gateway.text_workers import frames, host
from headrace.gateway.text_workers.limits import check_fits
from headrace.text.folder import TextModel


def parsers_of(rows: Iterable[Endpoint]) -> dict[str, BodyParser[Any]]:
    parsers: dict[str, BodyParser[Any]] = {}
    for row in rows:
        if row.parser is not None:
            assert "{" not in row.path, f"a request's own path is looked up, and {row.path} is none"
            assert row.path not in parsers, f"two rows read bodies of {row.path}"
            parsers[row.path] = row.parser
    return parsers


PARSERS = parsers_of(ENDPOINTS)


@dataclass(frozen=True, slots=True)
class TextContext:
    """Does the jobs of one text worker, with the models' texts."""

    texts: Mapping[str, TextModel]

    def answer(self, head: bytes, tail: bytes) -> tuple[frames.AnyAnswer, bytes]:
        """(reply, tail). Errors that a client or a model's folder can cause become replies."""
        try:
            return self._do(frames.read_job(head), tail)
        except MemoryError:
            return frames.NoMemory(is_last=True), b""
        except (InvalidRequest, UnsupportedMediaType) as error:
            return frames.refusal_of(error), b""
        except HeadraceError as error:  # a damaged folder: its message is the operator's
            return frames.Failed(detail=f"{type(error).__name__}: {error}"), b""
        except Exception as error:  # the outermost border; messages of foreign exceptions may quote a client's text
            return frames.Failed(detail="".join(traceback.format_tb(error.__traceback__)) + type(error).__name__), b""

    def _do(self, job: frames.AnyJob, tail: bytes) -> tuple[frames.AnyAnswer, bytes]:
        match job:
            case frames.ParseBody():
                return frames.Json(), msgspec.json.encode(parse_body(job.path, tail))
            case frames.EncodeChat():
                encoded, unread = encode_chat(self.texts[job.model], job)
                return _ids([encoded], unread)
            case frames.EncodeTexts():
                return _ids(encode_texts(self.texts[job.model], job))
            case frames.Tokenize():
                return self._tokenize(job)
            case frames.DecodeIds():
                tokenizer = self.texts[job.model].tokenizer
                ids = frames.ids_from_bytes(tail)
                check_token_ids(job.field, ids, tokenizer.vocab_size)
                return frames.Text(text=tokenizer.decode(ids, skip_special_tokens=job.skip_special_tokens)), b""

    def _tokenize(self, job: frames.Tokenize) -> tuple[frames.AnyAnswer, bytes]:
        text, prompt = self.texts[job.prompt.model], job.prompt
        ids: Sequence[int] = encode_chat(text, prompt)[0] if isinstance(prompt, frames.EncodeChat) else encode_texts(text, prompt)[0]
        ids_json = msgspec.json.encode(ids)
        spell = text.tokenizer.id_to_token
        strings_json = msgspec.json.encode([spell(token_id) or "" for token_id in ids] if job.needs_texts else None)
        return frames.Tokens(count=len(ids), num_id_bytes=len(ids_json)), ids_json + strings_json


def parse_body(path: str, body: bytes) -> Any:
    """Raises InvalidRequest or UnsupportedMediaType."""
    return PARSERS[path].parse(decode_object(body))


def encode_chat(text: TextModel, job: frames.EncodeChat) -> tuple[list[int], tuple[str, ...]]:
    """(ids, fields that the template does not read)."""
    rendered = text.template.rendered(
        text.tokenizer,
        job.messages,
        add_generation_prompt=job.add_generation_prompt,
        continue_final_message=job.continue_final_message,
        kwargs=job.kwargs,
        tools=job.tools,
        switches=job.switches,
    )
    check_fits("messages", rendered.plain_text, text.tokenizer.bound, job.max_model_len)
    return rendered.encode(text.tokenizer), rendered.unread


def encode_texts(text: TextModel, job: frames.EncodeTexts) -> list[list[int]]:
    for given in job.texts:
        check_fits("prompt", given, text.tokenizer.bound, job.max_model_len)
    return [text.tokenizer.encode(given, add_special_tokens=job.add_special_tokens) for given in job.texts]


def _ids(encoded: Sequence[Sequence[int]], unread: Sequence[str] = ()) -> tuple[frames.Ids, bytes]:
    return frames.Ids(counts=[len(ids) for ids in encoded], unread=list(unread)), b"".join(
        [frames.ids_to_bytes("prompt", ids) for ids in encoded]
    )


if __name__ == "__main__":
    host.main(lambda texts: TextContext(texts).answer)
