"""Finds the field of a request that an error of a foreign server is about, and whether the server refuses its name or its value.

A refused name is one that the server does not know, or not for this model: it refuses the field of every client. A refused value is the
fault of one client, and so is what it wrote inside a field. Where the words leave it open, it counts as a value. Texts may quote what the
client wrote, so a place (`param`, `loc`, `field`) decides where there is one.

A server may know a mark in one place alone: `cache_control` is the body's, `messages.cache_control` is one inside messages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from headrace.gateway.upstream.foreign.values import read_json
from headrace.gateway.upstream.generation_request import MARKS

LIMITS = ("max_tokens", "max_completion_tokens")
"""The two names of one limit."""

LEFT_OUT_INSIDE = MARKS | {"reasoning_content"}
"""Fields of messages, their parts and calls, and of functions, that a server without them has no use for."""


MAX_PLACE_CHARS = 256


class Refusal(NamedTuple):
    field: str
    is_name: bool


class _Said(NamedTuple):
    place: list[str]
    codes: str
    texts: list[str]


_TEXTS = ("message", "msg", "detail", "error", "title", "reason")
_IN_MESSAGES = ("messages", "tools")
_NO_PLACE = ("body", "None", "null")
_MAX_DEPTH = 8
_NAME = re.compile(r"[A-Za-z_]\w*")
_TEXT_PLACE = re.compile(r" - '([\w.\[\]]+)'$|'loc': \(([^)]{0,256})\)")

_OTHER_FIELDS = re.compile(
    r"\b(?:expected one of|must be one of|did you mean|use ['\"`]|supported (?:fields|parameters|params))", re.IGNORECASE
)
_QUOTED = re.compile(r"""(?<!\w)(?!(?<='type': )'\w+', 'loc')(?:'[^']*'|"[^"]*"|`[^`]*`)(?!\w)""")
"""All patterns take time in proportion to an error's length."""

_PATH = re.compile(r"[\w.\[\]/#]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ONE_CHOICE = re.compile(
    r"\bn (?:must|should|can|has to|is|>|=)|\bonly (?:one|1|a single) (?:\w+ )?(?:choice|completion)|multiple (?:choices|completions)",
    re.IGNORECASE,
)


def refused_field(body: bytes, names: Collection[str]) -> Refusal | None:
    try:
        said = list(_said(read_json(body)))
    except ValueError:
        return None
    has_place = any(each.place for each in said)
    for place, codes, texts in said:
        if place and (field := _named_by_place(place, names)) is not None:
            is_inside = place[-1] != _last(field)
            return Refusal(field, not is_inside and _is_name(_last(field), f"{codes}. {' '.join(texts)}"))
        for text in () if has_place else texts:
            if (field := _named_by_text(text, names)) is not None:
                return Refusal(field, _is_name(_last(field), f"{codes}. {text}"))
            if "n" in names and _ONE_CHOICE.search(text) is not None:
                return Refusal("n", is_name=False)
    return None


def _said(value: object, depth: int = 0) -> Iterator[_Said]:
    if depth == _MAX_DEPTH:
        return
    if isinstance(value, list):
        for each in value:
            yield from _said(each, depth + 1)
    elif isinstance(value, dict):
        texts = [text for name in _TEXTS if isinstance(text := value.get(name), str)]
        codes = " ".join([code for name in ("code", "type") if isinstance(code := value.get(name), str)])
        yield _Said(place_in(value), codes, texts)
        for name in _TEXTS:
            yield from _said(value.get(name), depth + 1)


def place_in(error: Mapping[str, object]) -> list[str]:
    if isinstance(loc := error.get("loc"), list):
        path = ".".join(map(str, loc))
    else:
        path = next((place for name in ("param", "field") if isinstance(place := error.get(name), str) and place), "")
    if not path:
        texts = [text for name in _TEXTS if isinstance(text := error.get(name), str)]
        path = next((match[1] or match[2] for text in texts if (match := _TEXT_PLACE.search(text)) is not None), "")
    return [part for part in _NAME.findall(path[:MAX_PLACE_CHARS]) if part not in _NO_PLACE]


def _named_by_place(place: list[str], names: Collection[str]) -> str | None:
    inside = [f"{place[0]}.{part}" for part in place[1:]]
    return next((name for name in inside if name in names), None) or _sent(place[0], names)


def _sent(word: str, names: Collection[str]) -> str | None:
    return min((name for name in names if _last(name) == word), default=None)  # the body's is the shortest, and first


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _named_by_text(text: str, names: Collection[str]) -> str | None:
    """A name that is a word of English has to be quoted, or to stand at the beginning with a colon behind it, or behind a colon or
    `parameter`. A mark whose place is not said may be any that the request had.
    """
    if (other := _OTHER_FIELDS.search(text)) is not None:
        text = text[: other.start()]
    text = _plain(_QUOTED.sub(lambda quoted: "''" if re.search(r"\s", quoted[0]) else quoted[0], text))
    at_to_name = {}
    for name in {_last(name) for name in names}:
        before = "" if "_" in name else r"(?:[\"'`.(]|: |\b(?:parameter|param|field|argument|property|option)s? )"
        pattern = rf"{before}(?<![a-z0-9_]){name}(?![a-z0-9_])"
        at_begin = rf"\b{name}[.\[/]\d" if name in _IN_MESSAGES else rf"\A{name}:"
        if (match := re.search(f"{pattern}|{at_begin}", text)) is not None:
            at_to_name[match.start()] = name
    words = [at_to_name[at] for at in sorted(at_to_name)]
    if words and words[0] in _IN_MESSAGES:
        words = [*(f"{words[0]}.{word}" for word in words[1:]), words[0]]
        return next((word for word in words if word in names), None)
    return _sent(words[0], names) if words else None


# ---------------------------------------------------------------------------------------------------------------- a name or a value

_FIELD = r"(?:param(?:eter)?|field|arg(?:ument)?|property|propertie|key|keyword|name|option|attribute)s?"
_NOT = r"(?:un(?:supported|known|recogni[sz]ed|expected)|extra(?:neous)?|additional)"
_NOT_TAKEN = (
    r"(?:unsupported|unknown|unrecogni[sz]ed|unexpected|deprecated|no longer supported"
    rf"|not (?:supported|permitted|recogni[sz]ed|known|allowed|accepted|a (?:valid|known|supported) {_FIELD}))"
)
_REFUSED_NAME = (
    rf"\b{_NOT}[ _](?:request |keyword )?{_FIELD}(?![a-z])",
    r"\bextra_forbidden\b|\bvalue_error\.extra\b|\bextra inputs\b",
    rf"\b{_FIELD} (?:is |are )?{_NOT_TAKEN}",
    rf"NAME['\"`\])]* (?:is |was |are )?{_NOT_TAKEN}",
    rf"\b(?:not|doesn't|cannot) (?:support|accept|allow|know|recogni[sz]e) (?:the |a )?(?:{_FIELD} )?['\"`]?NAME",
    rf"\b(?:use|using|favou?r of|replaced by|renamed to) (?:the )?(?:{_FIELD} )?['\"`]?OTHER(?![a-z0-9_])",
)
"""Words about a field's name. NAME: the field; OTHER: the other name of a limit"""

_ALWAYS = (
    r"(?:(?:this|the|your) (?:[\w'-]+ )?)?(?:models?|endpoint|server|api|deployment|provider|request|body|payload|input)\b(?! with| for)"
)

_REFUSED_VALUE = (
    r"\b(?:values?|range|when|while|unless|if|above|below|over|under|between|greater|less|larger|smaller|more than|at most|at least"
    r"|too [a-z]+|together|combin\w+|exceed\w*|(?:must|should|has to|can only) be(?! satisfied))\b",
    r"NAME['\"`)]*(?: of | is | to |[ :=(]+)['\"]?-?\d",
    rf"\b(?:(?:un)?support|allow|permit|accept)[^.;\n]{{0,80}}? (?:with|for|on|in|during|alongside|beside) (?!{_ALWAYS}(?! (?:and|or)\b))",
    rf"\b{_NOT}[ _](?:request |keyword )?{_FIELD}(?![a-z])[^'\"`.;\n]{{0,80}}''",
    r"NAME['\"`)\]]*(?:[.\[/][\d.\[\]/'\"`]*| ?-> ?(?:\d+ -> )*)[a-z_]",
)
"""Also of its use beside other fields or in some requests, of another name, or of a name inside the field."""


def _is_name(name: str, text: str) -> bool:
    other = dict(zip(LIMITS, LIMITS[::-1], strict=True)).get(name, "OTHER")
    own = re.compile(rf"(?<![a-z0-9_])(?:{name}|{other})(?![a-z0-9_])")

    def unquoted(quoted: re.Match[str]) -> str:
        path = _plain(quoted[0][1:-1])
        match = own.search(path) if _PATH.fullmatch(path) else None
        return "''" if match is None else f"'{path[match.start() :]}'"

    text = _plain(_QUOTED.sub(unquoted, text))

    def is_said(patterns: tuple[str, ...]) -> bool:
        return any(re.search(pattern.replace("NAME", name).replace("OTHER", other), text) is not None for pattern in patterns)

    return is_said(_REFUSED_NAME) and not is_said(_REFUSED_VALUE)


def _plain(text: str) -> str:
    return _CAMEL.sub("_", text).lower()
