# Made of asynchronous/lookup.py by `python scripts/sync_client.py`: change that one.
"""Resolution of an address to a checkpoint. The best step is the one that the store would name."""

from collections.abc import Collection
from difflib import get_close_matches
from http import HTTPStatus
from typing import Final

from cairn.service.client.addresses import BEST, Address
from cairn.service.client.client import Client
from cairn.service.errors import AddressError, NoCheckpointError, ProblemResponseError
from cairn.service.filters.expressions import quote
from cairn.service.schemas import Better, Checkpoint

_WAYS: Final[tuple[Better, ...]] = ("min", "max")
_MAX_EXAMINED: Final = 100  # checkpoints whose metrics an error message names


def find_root(client: Client, run: str) -> str:
    """Return the name of the one root that has a run.

    The catalog is asked; only if it knows no such run, each root's store is read. Of a server with
    one root, that one is returned whether it has the run or not.

    Raises:
        AddressError: Several roots have such a run.
        NoCheckpointError: None of several roots has it.
    """
    having = [listed.root for listed in client.runs(filter=f"name = {quote(run)}")]
    if not having:
        roots = [root.name for root in client.roots()]
        if len(roots) == 1:
            return roots[0]
        for root in roots:
            try:
                client.run(run, root=root, refresh=True)
            except ProblemResponseError as exc:
                if exc.status != HTTPStatus.NOT_FOUND:
                    raise
            else:
                having.append(root)
        if not having:
            raise NoCheckpointError(
                f"There is no run {run!r} in the roots {', '.join(roots)}. `cairn runs` lists what "
                "exists."
            )
    if len(having) > 1:
        names = ", ".join(f"{root}/{run}" for root in sorted(having))
        raise AddressError(f"{run!r} is in several roots. Name one of them: {names}.")
    return having[0]


def find_step(client: Client, address: Address, root: str) -> tuple[str, int]:
    """Resolve an address to a run and step.

    Raises:
        AddressError: The address asks for the best step by a metric whose direction is unknown.
        NoCheckpointError: The run has no checkpoint yet, or none with a value of the metric, or
            the alias's step is superseded and was saved again.
        ProblemResponseError: There is no such run or alias.
    """
    if address.best is not None:
        return address.run, best_step(client, address.run, address.best, root)
    if address.step is not None:
        return address.run, address.step
    if address.alias is not None:
        return address.run, (_aliased(client, address, address.alias, root)).step
    run = client.run(address.run, root=root, refresh=True)
    if run.latest_step is None:
        raise NoCheckpointError(
            f"{address.run}: expected a run with a checkpoint, found none listed. "
            f"`cairn checkpoints {address.run} --state all` shows what is there."
        )
    return address.run, run.latest_step


def find_checkpoint(client: Client, address: Address, root: str) -> Checkpoint:
    """Resolve an address to a checkpoint.

    Raises:
        AddressError, NoCheckpointError, ProblemResponseError: As `find_step`; or there is no such
            step.
    """
    if address.alias is not None:
        return _aliased(client, address, address.alias, root)
    run, step = find_step(client, address, root)
    return client.checkpoint(run, step, root=root)


def best_step(client: Client, run: str, best: str, root: str) -> int:
    """Return the listed step with the best value of a metric; the latest of equal ones.

    NaN is never best.

    Args:
        client: Client of the control plane.
        run: Name of the run.
        best: Metric, with `:min` or `:max` at its end; without, the steps' own direction counts.
        root: Name of the run's root.

    Raises:
        AddressError: Steps record another direction, or the direction is unknown.
        NoCheckpointError: No listed step has a value of the metric.
        ProblemResponseError: There is no such run.
    """
    suffix = next((way for way in _WAYS if best.endswith(f":{way}")), None)
    metric = best.removesuffix(f":{suffix}")
    name = quote(metric)
    client.run(run, root=root, refresh=True)  # a step that was saved just now must count
    noted: list[Better] = []
    for direction in _WAYS:
        said = f"better.{name} = {direction}"
        saying = client.checkpoints(run, root=root, filter=said, page_size=1)
        if next(saying, None) is not None:
            noted.append(direction)
    way = suffix or (noted[0] if len(noted) == 1 else None)
    order = f"metrics.{name} desc" if way == "max" else f"metrics.{name}"
    there = f"metrics.{name} <= inf"
    checkpoints = client.checkpoints(run, root=root, filter=there, order_by=order, page_size=1)
    first = next(checkpoints, None)
    if first is None:
        raise _no_value(client, run, metric, root)
    if way is None or any(direction != way for direction in noted):
        raise _no_way(run, best, metric, noted)
    return first.step


def _no_way(run: str, best: str, metric: str, noted: Collection[Better]) -> AddressError:
    if noted:
        return AddressError(
            f"{run}@{BEST}{best}: expected one direction in which values of {metric!r} are good, "
            f"found that steps say {' and '.join(noted)}. Ask for the best as the steps say, or "
            "correct what they say: `cairn annotate --better`."
        )
    return AddressError(
        f"{run}@{BEST}{best}: expected whether small or large values of {metric!r} are good, found "
        f"nothing that says so. Ask for {run}@{BEST}{metric}:min or {run}@{BEST}{metric}:max."
    )


def _aliased(client: Client, address: Address, name: str, root: str) -> Checkpoint:
    """Return the checkpoint that an alias points at."""
    alias = client.alias(address.run, name, root=root, refresh=True)
    listed = client.checkpoint(address.run, alias.step, root=root)
    if listed.attempt != alias.attempt:
        raise NoCheckpointError(
            f"{address}: expected step {alias.step} of attempt {alias.attempt}, to which the "
            f"alias was moved, found that of attempt {listed.attempt}: it was superseded, and "
            "saved anew. Promote the new one, or read the old one in the store by its alias."
        )
    return listed


def _no_value(client: Client, run: str, metric: str, root: str) -> NoCheckpointError:
    some: list[Checkpoint] = []
    for checkpoint in client.checkpoints(
        run, root=root, filter="metrics:*", page_size=_MAX_EXAMINED
    ):
        some.append(checkpoint)
        if len(some) == _MAX_EXAMINED:
            break
    metrics = sorted({name for checkpoint in some for name in checkpoint.metrics})
    near = get_close_matches(metric, metrics, n=1)
    metrics_text = f"some with {', '.join(map(repr, metrics))}" if metrics else "none with metrics"
    hint = f" Did you mean {near[0]!r}?" if near else f" `cairn checkpoints {run}` lists them."
    return NoCheckpointError(
        f"{run}: expected a checkpoint with a number as {metric!r}, found {metrics_text}.{hint}"
    )
