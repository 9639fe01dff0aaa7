"""Metrics that are read from databases at each scrape.

Each part is read by itself, with a short time limit. A part that cannot be read is left out, and
`cairn_scrape_problem` is 1 for it.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cairn.storage.store.deadlines import set_outcome

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 2.0
"""Time limit of all parts together; Prometheus waits 10 s by default."""

PROBLEM: Final = "cairn_scrape_problem"


class Sample(NamedTuple):
    """Value of a metric for one set of labels.

    Attributes:
        name: Name of the metric.
        labels: Labels of the value.
        value: Number, in the unit that the name ends with.
    """

    name: str
    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """Definition of a metric in a part.

    Attributes:
        name: Name of the metric.
        what: Help text, one line.
        labels: Names of its labels.
        counter: True for a counter, whose value only grows; False for a gauge.
    """

    name: str
    what: str
    labels: tuple[str, ...]
    counter: bool = False


class MetricSource(NamedTuple):
    """Metrics that are read together.

    Attributes:
        families: Definitions of the metrics.
        read: Function that returns their current values; it raises the database's errors.
    """

    families: tuple[Family, ...]
    read: Callable[[], Iterable[Sample]]


class ScrapedMetrics(Collector):
    """Prometheus collector that reads its parts at each scrape."""

    def __init__(self, parts: Mapping[str, MetricSource]) -> None:
        self._parts = dict(parts)
        self._asked: dict[str, Future[list[Sample]]] = {}
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics without values, so that registering them reads nothing."""
        families = [family for part in self._parts.values() for family in part.families]
        yield from (_empty(family) for family in families)
        yield GaugeMetricFamily(PROBLEM, "", labels=["part"])

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with the values that could be read."""
        problem = GaugeMetricFamily(
            PROBLEM, "Whether a part of these metrics could not be read.", labels=["part"]
        )
        with self._lock:
            for name, part in self._parts.items():
                last = self._asked.get(name)
                if last is None or last.done():  # if the last read still runs, do not start another
                    self._asked[name] = _begin(part)
            answers = dict(self._asked)
        wait(answers.values(), ANSWER_SECONDS)
        for name, part in self._parts.items():
            answer = answers[name]
            error = answer.exception() if answer.done() else TimeoutError("no answer yet")
            problem.add_metric([name], 0 if error is None else 1)
            if error is not None:
                logger.warning("metrics leave out %s: %s", name, error)
                continue
            metrics = {family.name: (family, _empty(family)) for family in part.families}
            for sample in answer.result():
                family, metric = metrics[sample.name]
                labels = [sample.labels[label] for label in family.labels]
                metric.add_metric(labels, sample.value)
            yield from (metric for _, metric in metrics.values())
        yield problem


def _begin(part: MetricSource) -> Future[list[Sample]]:
    """Read a part in a daemon thread: a silent database must not keep the process alive."""
    answer: Future[list[Sample]] = Future()

    read = partial(set_outcome, answer, lambda: [*part.read()])
    threading.Thread(target=read, name="cairn-metrics", daemon=True).start()
    return answer


def _empty(family: Family) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if family.counter else GaugeMetricFamily
    return kind(family.name, family.what, labels=family.labels)
