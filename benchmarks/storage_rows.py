"""The rows of the storage benchmark: what each compares, and what measurements it takes.

A row's value and its reference are measured in the same round, seconds or minutes apart; their
ratio is taken per round, and the row gives the medians over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import storage_workload as workload
from benchmarks.storage_contenders import CONTENDERS, KEPT, OURS
from benchmarks.storage_states import MANY_LAYERS

RAW = {"file": "raw write + fsync, one thread", "gcs": "one upload of the same bytes"}
READ = {"file": "one read of the bytes, one thread", "gcs": "one download of the bytes"}

FigureOf = Callable[[str], "Figure"]
Rounds = Sequence[Mapping["Measurement", Mapping[str, Any]]]


@dataclass(frozen=True)
class Measurement:
    """One process of one round.

    Attributes:
        measure: name of a function in `storage_measures`.
        contender: key of CONTENDERS.
        devices: onto which a restore goes.
        cache: what the page cache has of the files that a restore reads: all ("warm"), nothing
            ("cold"), or what the save left there ("saved").
    """

    measure: str
    contender: str
    devices: int = workload.DEVICES
    cache: str = "warm"

    def __str__(self) -> str:
        return f"{self.measure} {self.contender}" + (
            f" on {self.devices} devices, {self.cache}" if self.measure == "restore" else ""
        )


@dataclass(frozen=True)
class Figure:
    """One number of one measurement."""

    measurement: Measurement
    field: str


@dataclass(frozen=True)
class Row:
    """One line of the results.

    Attributes:
        name: of the row; a peer's ends with its label.
        budget: the most that the ratio may be; None for peers, and in a bucket.
        value: what is measured.
        reference: what it is divided by.
        reference_name: what the results call it.
        unit: "seconds" or "bytes".
        seconds: how long it took, where the value is bytes.
        bytes: the size of what was handled.
    """

    name: str
    budget: float | None
    value: Figure
    reference: Figure
    reference_name: str
    unit: str
    seconds: Figure
    bytes: Figure

    def measurements(self) -> set[Measurement]:
        """What must be run for this row."""
        return {figure.measurement for figure in (self.value, self.reference)}

    @property
    def needs_direct_io(self) -> bool:
        """Does it ask what the disk itself can do."""
        return any(
            each.contender == "direct" or each.measure == "read_direct"
            for each in self.measurements()
        )

    def result(self, rounds: Rounds) -> dict[str, Any] | None:
        """The row's JSON, from the rounds that have all of it; None if none has."""
        complete = [each for each in rounds if self.measurements() <= each.keys()]
        if not complete:
            return None
        values = [_number(each, self.value) for each in complete]
        references = [_number(each, self.reference) for each in complete]
        return {
            "row": self.name,
            "seconds": statistics.median(_number(each, self.seconds) for each in complete),
            "bytes": int(statistics.median(_number(each, self.bytes) for each in complete)),
            "reference": {
                "name": self.reference_name,
                self.unit: statistics.median(references),
            },
            "ratio": statistics.median(
                value / reference for value, reference in zip(values, references, strict=True)
            ),
            "budget": self.budget,
            "runs": values,
        }


def all_rows(store: str) -> list[Row]:
    """Every row for a store, "file" or "gcs": ours, each followed by its peers'.

    Budgets are for a local disk. A server that shares the machine with the benchmark is no measure.
    """
    rows = _rows(store)
    return rows if store == "file" else [replace(row, budget=None) for row in rows]


def _rows(store: str) -> list[Row]:
    kinds = {
        key: kind
        for key, kind in CONTENDERS.items()
        if key != KEPT and (store == "file" or kind.buckets)
    }
    savers = [key for key in kinds if key not in ("raw", "direct", "views")]
    asynchronous = [key for key in kinds if kinds[key].asynchronous]
    on_devices = [key for key in asynchronous if not kinds[key].takes_host_arrays]
    donated = [*on_devices, *(["views"] if store == "file" else [])]
    restorers = [key for key in kinds if kinds[key].restores and key != "safetensors"]
    orbax = CONTENDERS["orbax"].label
    return [
        *(_of_the_disk(restorers, donated) if store == "file" else []),
        *_timed(
            "async save until durable", 0.95, savers, _save("durable"), _save("durable", "raw"),
            RAW[store],
        ),
        *_timed(
            "blocked, first save", 0.3, asynchronous, _save("blocked_first"),
            _save("blocked_first", "orbax"), orbax,
        ),
        *_timed(
            "blocked, later saves", 0.3, asynchronous, _save("blocked_later"),
            _save("blocked_later", "orbax"), orbax,
        ),
        *_timed(
            "blocked, donating step running", 0.3, donated, _train("blocked_first"),
            _train("blocked_first", "orbax"), orbax,
        ),
        *_timed(
            "blocked, donating step running, later save", 0.3, donated, _train("blocked_later"),
            _train("blocked_later", "orbax"), orbax,
        ),
        *_sized(
            "extra peak memory during a save", 0.1, savers, _save("extra"), _save("bytes"),
            "state size", _save("durable"),
        ),
        *_sized(
            "extra peak memory, donating step running", 1.1, on_devices, _train("extra"),
            _train("bytes"), "state size", _train("durable"),
        ),
        *_timed(
            "restore warm", 0.8, restorers, _restore(), _restore(key="safetensors"),
            "safetensors load_file + device_put",
        ),
        *_timed(
            "restore onto half the devices", 1.1, on_devices, _restore(workload.DEVICES // 2),
            _restore(), "its own restore onto the same devices",
        ),
        *_timed(
            "verify", 1.1, [OURS], _of("verify", "seconds"), _of("read", "seconds"), READ[store],
        ),
        *_sized(
            "LoRA step save", 1.1, [OURS], _of("save_adapters", "added"),
            _of("save_adapters", "trained"), "trainable and optimizer leaves",
            _of("save_adapters", "seconds"),
        ),
        *_timed(
            "blocked, 50,000 small leaves", 1.5, [OURS], _of("many_leaves", "blocked"),
            _of("many_leaves", "held"), "np.asarray of each leaf",
        ),
        *_call_of("EasyDeLState.save_state", "save_state", "save_items"),
        *_call_of("TrainState.save_state", "save_train_state", "save_items"),
        *_call_of(
            f"EasyDeLState.save_state of {MANY_LAYERS} layers",
            "save_state_of_many_layers", "save_items_of_many_layers",
        ),
        *_timed(
            "restore, 50,000 small leaves", 2.0, [OURS], _of("many_leaves", "restored"),
            _of("many_leaves", "placed"), "device_put of each leaf",
        ),
    ]  # fmt: skip


def _of_the_disk(restorers: Sequence[str], donated: Sequence[str]) -> list[Row]:
    """Rows that compare with the disk's own speed, or depend on what the page cache has."""
    orbax = CONTENDERS["orbax"].label
    safetensors_cold = _restore(key="safetensors", cache="cold")
    return [
        *_timed(
            "async save until durable, of direct write", 1.2, [OURS], _save("durable"),
            _save("durable", "direct"), CONTENDERS["direct"].label,
        ),
        *_timed(
            "restore cold, of direct read", 1.15, [OURS], _restore(cache="cold"),
            _of("read_direct", "seconds"), "direct read into fresh memory, eight threads",
        ),
        *_timed(
            "restore cold, of safetensors cold", 0.8, restorers, _restore(cache="cold"),
            safetensors_cold, "safetensors load_file + device_put, cold",
        ),
        *_timed(
            "restore right after a save", 1.0, [OURS], _restore(cache="saved"),
            _restore(cache="cold"), "its own cold restore",
        ),
        *_timed(
            "cost of a save to a donating loop, first", 0.7, donated, _train("cost_first"),
            _train("cost_first", "orbax"), orbax,
        ),
        *_timed(
            "cost of a save to a donating loop, later", 0.7, donated, _train("cost_later"),
            _train("cost_later", "orbax"), orbax,
        ),
        _of_kept_buffers("first", None),
        _of_kept_buffers("later", 0.4),
        *_timed(
            "processor time of a save", None, [OURS, "orbax_tuned"], _save("worked"),
            _save("worked", "orbax"), orbax,
        ),
        *_timed(
            "processor time of a cold restore", None, [OURS, "orbax_tuned", "safetensors"],
            _restore(cache="cold", field="worked"),
            _restore(cache="cold", field="worked", key="orbax"), orbax,
        ),
    ]  # fmt: skip


def _call_of(name: str, measure: str, reference: str) -> list[Row]:
    """The call that a training job makes, first and later, beside what does its work."""
    return [
        row
        for which in ("first", "later")
        for row in _timed(
            f"call of {name}, {which}", 2.0, [OURS], _of(measure, which), _of(reference, which),
            "Checkpointer.save of the same leaves",
        )
    ]  # fmt: skip


def _of_kept_buffers(which: str, budget: float | None) -> Row:
    """Ours again, with an option that has a budget of its own; the first save makes the buffers."""
    name = f"cost of a save to a donating loop, kept buffers, {which}"
    value, reference = (_train(f"cost_{which}")(key) for key in (KEPT, "orbax"))
    nbytes = Figure(value.measurement, "bytes")
    label = CONTENDERS["orbax"].label
    return Row(name, budget, value, reference, label, "seconds", seconds=value, bytes=nbytes)


def is_peers(name: str) -> bool:
    """Is the row of this name about somebody else."""
    return any(name.endswith(f", {kind.label}") for key, kind in CONTENDERS.items() if key != OURS)


def _of(measure: str, field: str, key: str | None = None) -> FigureOf:
    """Of the contender `key`, or of the one that the row is about."""
    return lambda own: Figure(Measurement(measure, key or own), field)


def _save(field: str, key: str | None = None) -> FigureOf:
    return _of("save", field, key)


def _train(field: str, key: str | None = None) -> FigureOf:
    return _of("save_while_training", field, key)


def _restore(
    devices: int = workload.DEVICES,
    key: str | None = None,
    *,
    cache: str = "warm",
    field: str = "seconds",
) -> FigureOf:
    return lambda own: Figure(Measurement("restore", key or own, devices, cache), field)


def _timed(
    name: str,
    budget: float | None,
    keys: Sequence[str],
    value: FigureOf,
    reference: FigureOf,
    reference_name: str,
) -> list[Row]:
    """A row in seconds for each contender."""
    return [
        Row(
            *_named(name, budget, key), value(key), reference(key), reference_name, "seconds",
            seconds=value(key), bytes=Figure(value(key).measurement, "bytes"),
        )
        for key in keys
    ]  # fmt: skip


def _sized(
    name: str,
    budget: float,
    keys: Sequence[str],
    value: FigureOf,
    reference: FigureOf,
    reference_name: str,
    seconds: FigureOf,
) -> list[Row]:
    """A row in bytes for each contender."""
    return [
        Row(
            *_named(name, budget, key), value(key), reference(key), reference_name, "bytes",
            seconds=seconds(key), bytes=value(key),
        )
        for key in keys
    ]  # fmt: skip


def _named(name: str, budget: float | None, key: str) -> tuple[str, float | None]:
    return (name, budget) if key == OURS else (f"{name}, {CONTENDERS[key].label}", None)


def _number(measured: Mapping[Measurement, Mapping[str, Any]], figure: Figure) -> float:
    return float(measured[figure.measurement][figure.field])
