"""Sets of characters in ECMAScript's regular expressions, and how one is written for llguidance.

llguidance matches strings in their JSON spelling. Where a set holds all control characters, it takes every short escape for a member of the
set, quotes and backslashes too. A set without either is therefore written without the control characters that have no short escape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]
"""The first and the last code point."""

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_WITHOUT_SHORT_ESCAPE = ((0, 7), (11, 11), (14, 31), (127, 127))

_CATEGORIES = frozenset(
    {
        *("C", "Cc", "Cf", "Cn", "Co", "L", "LC", "Ll", "Lm", "Lo", "Lt", "Lu", "M", "Mc", "Me", "Mn", "N", "Nd", "Nl", "No"),
        *("P", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S", "Sc", "Sk", "Sm", "So", "Z", "Zl", "Zp", "Zs"),
        *("Letter", "Uppercase_Letter", "Lowercase_Letter", "Titlecase_Letter", "Modifier_Letter", "Other_Letter", "Mark"),
        *("Nonspacing_Mark", "Spacing_Mark", "Enclosing_Mark", "Number", "Decimal_Number", "Letter_Number", "Other_Number"),
        *("Punctuation", "Symbol", "Math_Symbol", "Currency_Symbol", "Modifier_Symbol", "Other_Symbol", "Separator"),
    }
)
_BINARY = frozenset(
    {"Any", "ASCII", "Alphabetic", "Alpha", "Lowercase", "Lower", "Uppercase", "Upper", "White_Space", "ID_Start", "ID_Continue"}
)
_SCRIPT = re.compile(r"(?:Script|sc)=([A-Za-z_]+)")
_WITH_QUOTES = frozenset({"P", "Po", "Punctuation", "Any", "ASCII", "Common", "Zyyy"})
_WITH_CONTROLS = frozenset({"C", "Cc", "Any", "ASCII", "Common", "Zyyy"})


@dataclass(frozen=True, slots=True)
class CharSet:
    """Characters: those in the ranges or with one of the properties; all others where `is_excluding`.

    ranges      sorted, neither overlapping nor adjacent
    properties  Unicode properties as ECMAScript and Rust write them: \\p{...} or \\P{...}
    """

    ranges: tuple[Range, ...] = ()
    properties: tuple[str, ...] = ()
    is_excluding: bool = False

    @classmethod
    def of(cls, ranges: Iterable[Range], properties: Iterable[str] = (), *, is_excluding: bool = False) -> CharSet:
        """The set of these ranges, in any order. Without properties it is never an excluding one."""
        found, named = _merged(ranges), tuple(dict.fromkeys(properties))
        return cls(_others(found) if is_excluding and not named else found, named, is_excluding and bool(named))

    def has(self, char: str) -> bool:
        """Whether a quote or a backslash is in the set."""
        is_listed = any(first <= ord(char) <= last for first, last in self.ranges)
        return (is_listed or any(_is_of(name, _WITH_QUOTES) for name in self.properties)) != self.is_excluding

    def minus(self, other: CharSet) -> CharSet:
        """The characters that are not in the other set. Neither set may have properties."""
        return CharSet.of([*_others(self.ranges), *other.ranges], is_excluding=True)

    def text(self) -> str:
        """The set as an expression for one of its characters, which both dialects read alike. Empty where no string can hold one."""
        has_escapes = self.has('"') and self.has("\\")
        if self.is_excluding:
            ranges = self.ranges if has_escapes else _merged([*self.ranges, *_WITHOUT_SHORT_ESCAPE])
            return f"[^{_written(ranges)}{''.join(self.properties)}]"
        ranges = self.ranges if has_escapes else _without(self.ranges, _WITHOUT_SHORT_ESCAPE)
        if has_escapes or not any(_has_controls(name) for name in self.properties):
            text = _written(ranges) + "".join(self.properties)
            return (not self.properties and _one_char(ranges)) or (f"[{text}]" if text else "")
        listed = _one_char(ranges) or (f"[{_written(ranges)}]" if ranges else "")
        rest = [f"[^{_written(_WITHOUT_SHORT_ESCAPE)}{_opposite(name)}]" for name in self.properties]
        return f"(?:{'|'.join([*([listed] if listed else []), *rest])})"


ANY = CharSet(((0, LAST),))


def property_set(name: str, *, is_excluding: bool) -> CharSet | None:
    """The characters with a Unicode property; None for a property that is not supported."""
    value = name.removeprefix("General_Category=").removeprefix("gc=")
    if value in _CATEGORIES or name in _BINARY or _SCRIPT.fullmatch(name):
        return CharSet.of((), [f"\\{'P' if is_excluding else 'p'}{{{name}}}"])
    return None


def joined(sets: Iterable[CharSet], *, is_excluding: bool = False) -> CharSet:
    """All characters of the sets, none of which is an excluding one; or all others."""
    found = list(sets)
    ranges = [each for chars in found for each in chars.ranges]
    return CharSet.of(ranges, [name for chars in found for name in chars.properties], is_excluding=is_excluding)


def char_text(char: str) -> str:
    """A character, so that it stands for itself outside of brackets."""
    return f"\\{char}" if char in "\\^$.*+?()[]{}|/" else _plain(char)


def has_only_short_escapes(text: str) -> bool:
    """Whether a JSON string can hold the text without `\\u`."""
    return not any(first <= ord(char) <= last for char in text for first, last in _WITHOUT_SHORT_ESCAPE)


def _is_of(name: str, values: frozenset[str]) -> bool:
    """Whether a property is one of those with these values, or the opposite of another."""
    return (name[3:-1].rpartition("=")[2] in values) != name.startswith("\\P")


def _has_controls(name: str) -> bool:
    return _is_of(name, _WITH_CONTROLS)


def _opposite(name: str) -> str:
    return f"\\{'p' if name[1] == 'P' else 'P'}{name[2:]}"


def _one_char(ranges: tuple[Range, ...]) -> str:
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not _is_surrogate(ranges[0][0])
    return char_text(chr(ranges[0][0])) if is_one else ""


def _written(ranges: Iterable[Range]) -> str:
    """The ranges as they stand in brackets, without surrogates, which no string can hold."""
    written = []
    for first, last in ranges:
        first, last = 0xE000 if _is_surrogate(first) else first, 0xD7FF if _is_surrogate(last) else last
        if first <= last:
            begin, end = _class_text(first), _class_text(last)
            written.append(begin if first == last else f"{begin}{end}" if last == first + 1 else f"{begin}-{end}")
    return "".join(written)


def _class_text(point: int) -> str:
    return f"\\{chr(point)}" if chr(point) in "\\][^-&~" else _plain(chr(point))


def _plain(char: str) -> str:
    return char if char.isprintable() else f"\\u{{{ord(char):X}}}"


def _is_surrogate(point: int) -> bool:
    return _SURROGATES[0] <= point <= _SURROGATES[1]


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def _others(ranges: Iterable[Range]) -> tuple[Range, ...]:
    found, begin = [], 0
    for first, last in ranges:
        if begin < first:
            found.append((begin, first - 1))
        begin = last + 1
    return (*found, (begin, LAST)) if begin <= LAST else tuple(found)


def _without(ranges: Iterable[Range], excluded: Iterable[Range]) -> tuple[Range, ...]:
    return _others(_merged([*_others(ranges), *excluded]))
