"""Maps fields of a request to the variable that switches them in this model's chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSwitch:
    """values  the preferred variable first
    is_off  the value means what a template without these variables does; else such a template refuses the request
    """

    field: str
    values: Mapping[str, str | bool]
    given: str | bool | None = None
    is_off: bool = False


def switched(
    kwargs: Mapping[str, object], switches: Sequence[TemplateSwitch], variables: Collection[str]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """(all variables, the fields of switches without effect).

    Raises InvalidRequest for a switch the template does not have, or that contradicts another field.
    """
    made, without_effect = dict(kwargs), []
    for switch in switches:
        name = next((name for name in switch.values if name in variables), None)
        if name is not None:
            value = switch.values[name]
            if made.setdefault(name, value) != value:
                raise InvalidRequest(switch.field, f"no other value of {name} beside it", switch.given, "Give one of the two fields.")
        elif switch.is_off:
            without_effect.append(switch.field)
        else:
            rule = f"a model whose chat template reads {' or '.join(switch.values)}"
            raise InvalidRequest(switch.field, rule, switch.given, "Leave it out for this model.")
    return made, tuple(without_effect)
