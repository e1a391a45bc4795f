"""The deployment's budget on the metrics page, so that an alarm comes before it is spent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.observe.tenant_metrics import BUDGET_PREFIX


@dataclass(frozen=True, slots=True)
class BudgetReading:
    """One budget of all tenants together, in the currency of `prices`. label: of its limit; used: what is reserved counts too"""

    label: str
    budget: float
    used: float


class BudgetCollector(Collector):
    """What the limits' store said last. There are no series without a budget, and none while the store fails."""

    def __init__(self, readings: Callable[[], Sequence[BudgetReading]]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        text = "Money that all tenants together may use, in the currency of `prices`."
        budget = GaugeMetricFamily(BUDGET_PREFIX, text, labels=("limit",))
        used = GaugeMetricFamily(f"{BUDGET_PREFIX}_used", "What is used or reserved of it.", labels=("limit",))
        for reading in self._readings():
            budget.add_metric((reading.label,), reading.budget)
            used.add_metric((reading.label,), reading.used)
        yield from (budget, used)
