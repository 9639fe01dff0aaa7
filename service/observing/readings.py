"""What is looked up when somebody asks for the metrics: numbers that lie in databases.

Each part of them is asked for by itself and not waited for long: what can't be read is left out,
and said.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Final, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 2.0
"""How long a part may take; Prometheus waits 10 s by default."""

PROBLEM: Final = "cairn_scrape_problem"


class Reading(NamedTuple):
    """One number.

    Attributes:
        name: Of the metric.
        labels: What it is of.
        value: In the unit that the name ends with.
    """

    name: str
    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """One metric that a part gives.

    Attributes:
        name: Of the metric.
        what: One line.
        labels: Names of its labels.
        counter: It only grows.
    """

    name: str
    what: str
    labels: tuple[str, ...]
    counter: bool = False


class Part(NamedTuple):
    """What is read together.

    Attributes:
        families: The metrics that it gives.
        read: Their numbers now; raises whatever the database does.
    """

    families: tuple[Family, ...]
    read: Callable[[], Iterable[Reading]]


class Readings(Collector):
    """Parts of the metrics, read anew each time."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = dict(parts)
        self._asked: dict[str, Future[list[Reading]]] = {}
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """The metrics, without numbers: none is read to register them."""
        families = [family for part in self._parts.values() for family in part.families]
        yield from (_empty(family) for family in families)
        yield GaugeMetricFamily(PROBLEM, "", labels=["part"])

    def collect(self) -> Iterator[Metric]:
        """The metrics, with the numbers that could be read."""
        problem = GaugeMetricFamily(
            PROBLEM, "Whether a part of these metrics could not be read.", labels=["part"]
        )
        answers = self._ask()
        wait(answers.values(), ANSWER_SECONDS)
        for name, part in self._parts.items():
            answer = answers[name]
            error = answer.exception() if answer.done() else TimeoutError("no answer yet")
            problem.add_metric([name], 0 if error is None else 1)
            if error is not None:
                logger.warning("metrics leave out %s: %s", name, error)
                continue
            yield from _filled(part.families, answer.result())
        yield problem

    def _ask(self) -> dict[str, Future[list[Reading]]]:
        """The answers to come: of each part that still waits for its last one, that."""
        with self._lock:
            for name, part in self._parts.items():
                last = self._asked.get(name)
                if last is None or last.done():
                    self._asked[name] = _begin(part)
            return dict(self._asked)


def _begin(part: Part) -> Future[list[Reading]]:
    """Read a part in a thread that does not keep the process alive: it may wait for good."""
    answer: Future[list[Reading]] = Future()

    def read() -> None:
        try:
            answer.set_result([*part.read()])
        except Exception as exc:
            answer.set_exception(exc)

    threading.Thread(target=read, name="cairn-metrics", daemon=True).start()
    return answer


def _empty(family: Family) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if family.counter else GaugeMetricFamily
    return kind(family.name, family.what, labels=family.labels)


def _filled(families: Iterable[Family], readings: Iterable[Reading]) -> Iterator[Metric]:
    metrics = {family.name: (family, _empty(family)) for family in families}
    for reading in readings:
        family, metric = metrics[reading.name]
        metric.add_metric([reading.labels[label] for label in family.labels], reading.value)
    yield from (metric for _, metric in metrics.values())
