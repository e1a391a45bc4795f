"""Sets of characters in ECMAScript's regular expressions, and how one is written for llguidance.

llguidance matches strings in their JSON spelling. Where a set holds all control characters, llguidance takes every short escape for a
member of it, quotes and backslashes too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]

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
    """properties  Unicode properties as ECMAScript and Rust write them: \\p{...} or \\P{...}"""

    ranges: tuple[Range, ...] = ()
    properties: tuple[str, ...] = ()
    is_excluding: bool = False

    @classmethod
    def of(cls, ranges: Iterable[Range], properties: Iterable[str] = (), *, is_excluding: bool = False) -> CharSet:
        """Without properties the set is never an excluding one."""
        merged, named = _merged(ranges), tuple(dict.fromkeys(properties))
        return cls(_others(merged) if is_excluding and not named else merged, named, is_excluding and bool(named))

    def has(self, char: str) -> bool:
        is_listed = any(first <= ord(char) <= last for first, last in self.ranges)
        return (is_listed or any(_is_of(name, _WITH_QUOTES) for name in self.properties)) != self.is_excluding

    def minus(self, other: CharSet) -> CharSet:
        return CharSet.of([*_others(self.ranges), *other.ranges], is_excluding=True)

    def text(self) -> str:
        """Empty where no string can hold one of these characters."""
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
    value = name.removeprefix("General_Category=").removeprefix("gc=")
    if value in _CATEGORIES or name in _BINARY or _SCRIPT.fullmatch(name):
        return CharSet.of((), [f"\\{'P' if is_excluding else 'p'}{{{name}}}"])
    return None


def joined(sets: Iterable[CharSet], *, is_excluding: bool = False) -> CharSet:
    parts = list(sets)
    ranges = [each for chars in parts for each in chars.ranges]
    return CharSet.of(ranges, [name for chars in parts for name in chars.properties], is_excluding=is_excluding)


def with_case(chars: CharSet) -> CharSet | None:
    """By Unicode's simple case folding. None for letters beyond ASCII, except in sets that hold all of them or none."""
    if chars in _IN_EITHER_CASE:
        return chars
    if chars.properties or any(last > 0x7F and (first != last or _has_case(chr(first))) for first, last in chars.ranges):
        return None
    ranges = list(chars.ranges)
    for first, last in chars.ranges:
        for begin, offset in ((0x41, 32), (0x61, -32)):
            if first <= begin + 25 and begin <= last:
                ranges.append((max(first, begin) + offset, min(last, begin + 25) + offset))
        ranges += [
            (special, special)
            for special, plain in ((0x17F, 0x53), (0x17F, 0x73), (0x212A, 0x4B), (0x212A, 0x6B))
            if first <= plain <= last
        ]
    return CharSet.of(ranges)


def char_text(char: str) -> str:
    return f"\\{char}" if char in "\\^$.*+?()[]{}|/" else _plain(char)


def has_only_short_escapes(text: str) -> bool:
    return not any(first <= ord(char) <= last for char in text for first, last in _WITHOUT_SHORT_ESCAPE)


def _is_of(name: str, values: frozenset[str]) -> bool:
    return (name[3:-1].rpartition("=")[2] in values) != name.startswith("\\P")


def _has_controls(name: str) -> bool:
    return _is_of(name, _WITH_CONTROLS)


def _opposite(name: str) -> str:
    return f"\\{'p' if name[1] == 'P' else 'P'}{name[2:]}"


def _one_char(ranges: tuple[Range, ...]) -> str:
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not _is_surrogate(ranges[0][0])
    return char_text(chr(ranges[0][0])) if is_one else ""


def _written(ranges: Iterable[Range]) -> str:
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
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def _others(ranges: Iterable[Range]) -> tuple[Range, ...]:
    gaps, begin = [], 0
    for first, last in ranges:
        if begin < first:
            gaps.append((begin, first - 1))
        begin = last + 1
    return (*gaps, (begin, LAST)) if begin <= LAST else tuple(gaps)


def _without(ranges: Iterable[Range], excluded: Iterable[Range]) -> tuple[Range, ...]:
    return _others(_merged([*_others(ranges), *excluded]))


def _has_case(char: str) -> bool:
    return char.lower() != char or char.upper() != char


DIGITS = CharSet.of([(0x30, 0x39)])
WORD = CharSet.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACE = CharSet.of(
    [(9, 13), *((point, point) for point in (0x20, 0xA0, 0x1680, 0x202F, 0x205F, 0x3000, 0xFEFF)), (0x2000, 0x200A), (0x2028, 0x2029)]
)
LINE_ENDS = CharSet.of([(10, 10), (13, 13), (0x2028, 0x2029)])
DOT = ANY.minus(LINE_ENDS)

_WORD_IN_EITHER_CASE = CharSet.of([*WORD.ranges, (0x17F, 0x17F), (0x212A, 0x212A)])
_CLOSED = (DIGITS, SPACE, _WORD_IN_EITHER_CASE)
_IN_EITHER_CASE = frozenset({ANY, DOT, *_CLOSED, *(ANY.minus(chars) for chars in _CLOSED)})
