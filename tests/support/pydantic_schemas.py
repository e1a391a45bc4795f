"""Makes JSON schemas with the installed pydantic, of models with the types that people use."""

from __future__ import annotations

import datetime
import ipaddress
import pathlib
import re
import uuid
from collections import Counter, deque
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from pydantic import (
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PositiveInt,
    RootModel,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    computed_field,
)
from typing_extensions import TypedDict


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Plain(BaseModel):
    name: str
    age: int
    ratio: float = 0.5


class Closed(BaseModel):
    """A model that forbids other properties."""

    model_config = ConfigDict(extra="forbid")
    flag: bool
    nothing: None = None


class Optionals(BaseModel):
    model_config = ConfigDict(extra="allow", title="With others")
    a: int | None
    b: str | int | None = None
    c: Literal["x", 2, True] = "x"


class Constrained(BaseModel):
    code: Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}-\d{2,4}$")]
    text: Annotated[str, Field(min_length=2, max_length=8, examples=["abc"])]
    share: Annotated[float, Field(gt=0, lt=1)]
    count: Annotated[int, Field(ge=-3, le=3, multiple_of=3)]


class Times(BaseModel):
    moment: datetime.datetime
    day: datetime.date
    hour: datetime.time
    span: datetime.timedelta
    aware: AwareDatetime | None = Field(None, deprecated=True)


class Identified(BaseModel):
    id: uuid.UUID
    key: Annotated[uuid.UUID, Field(description="another one")]
    host: ipaddress.IPv4Address
    net: ipaddress.IPv6Network
    url: AnyUrl


class Files(BaseModel):
    path: pathlib.Path
    data: bytes
    password: SecretStr


class Money(BaseModel):
    amount: Decimal
    bounded: Annotated[Decimal, Field(ge=0, le=10, decimal_places=1)]


class Holder(BaseModel):
    raw: Json[list[int]]
    anything: Any
    colour: Colour = Colour.RED
    level: Level | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: PositiveInt


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str] = Field(default=[], max_length=2)


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Node(BaseModel):
    value: int
    children: list[Node] = []
    parent: Node | None = None


class Pair(NamedTuple):
    x: int
    label: str


class Tuples(BaseModel):
    fixed: tuple[int, str]
    pair: Pair
    several: Annotated[tuple[bool, ...], Field(min_length=1)]
    queue: Annotated[deque[int], Field(max_length=3)] = Field(title="A queue")


class Maps(BaseModel):
    plain: dict[str, int]
    by_literal: dict[Literal["a", "b"], float]
    by_enum: dict[Colour, list[int]]
    by_pattern: dict[Annotated[str, StringConstraints(pattern="^[a-z]{1,3}$")], bool]
    by_length: dict[Annotated[str, Field(min_length=1, max_length=4)], None]
    by_id: dict[uuid.UUID, int] = {}
    by_day: dict[datetime.date, int] = {}
    counted: Counter[str] = Counter()


class Words(RootModel[Annotated[list[str], Field(min_length=1, max_length=3)]]):
    """A list of words."""


@dataclass
class Place:
    lat: Annotated[float, Field(ge=-90, le=90)]
    lon: Annotated[float, Field(ge=-180, le=180)] = 0


class Options(TypedDict):
    fast: bool
    depth: NotRequired[int]


class Aliased(BaseModel):
    from_: Annotated[str, Field(alias="from", max_length=5)]
    options: Options
    place: Place

    @computed_field  # type: ignore[prop-decorator]
    @property
    def size(self) -> int:
        return 1


class Sized(BaseModel):
    big: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    wide: Annotated[float, Field(ge=-(2.0**70), le=2.0**70)]
    few: Annotated[dict[str, bool], Field(min_length=1, max_length=2)]


class Patterned(BaseModel):
    expression: re.Pattern[str]


class Sets(BaseModel):
    some: set[int]
    more: frozenset[Colour] = Field(frozenset(), max_length=4)


class Keyed(BaseModel):
    by_both: dict[Annotated[str, StringConstraints(pattern="^x", max_length=3)], int]


MODELS: dict[str, Any] = {
    **{
        model.__name__: model
        for model in (Plain, Closed, Optionals, Constrained, Times, Identified, Files, Money, Holder, Owner, Node, Tuples, Maps, Words)
    },
    **{model.__name__: model for model in (Aliased, Sized, Patterned, Sets, Keyed)},
    "a union": Annotated[int | list[Cat] | None, Field(description="of types")],
    "a list of pairs": list[tuple[Literal["k"], float]],
}


def pydantic_schemas() -> dict[str, Any]:
    """Each model's schema of what it takes, and of what it writes where that is another one."""
    found: dict[str, Any] = {}
    for name, model in MODELS.items():
        found[f"pydantic: {name}"] = taken = TypeAdapter(model).json_schema()
        written = TypeAdapter(model).json_schema(mode="serialization")
        if written != taken:
            found[f"pydantic: {name}, written"] = written
    return found
