"""Shows the deployment's budget on the metrics page, so that an alarm comes before it is spent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from headrace.observe.tenant_metrics import BUDGET_PREFIX


@dataclass(frozen=True, slots=True)
class BudgetReading:
    """One budget of all tenants together, in the currency of `prices`. label: of its limit; used: reserved money included"""

    label: str
    budget: float
    used: float


def budget_families(readings: Iterable[BudgetReading]) -> Iterator[Metric]:
    """The budgets as the limits' store last reported them. Without budgets, and while the store fails, there are no series."""
    text = "Money that all tenants together may use, in the currency of `prices`."
    budget = GaugeMetricFamily(BUDGET_PREFIX, text, labels=("limit",))
    used = GaugeMetricFamily(f"{BUDGET_PREFIX}_used", "What is used or reserved of it.", labels=("limit",))
    for reading in readings:
        budget.add_metric((reading.label,), reading.budget)
        used.add_metric((reading.label,), reading.used)
    yield from (budget, used)
