"""The run or the step that an argument names, in whichever form and root.

A run is written RUN, ROOT/RUN, or as the URI or path of its folder. A step is written as a run
(its latest step), or with @ALIAS, @best:METRIC or /steps/N behind it.
"""

from dataclasses import dataclass

import typer

from cairn.service.client.addresses import LATEST, Address
from cairn.service.client.client import Client
from cairn.service.client.lookup import find_checkpoint, find_root, find_step
from cairn.service.errors import AddressError
from cairn.service.schemas import Checkpoint
from cairn.storage.errors import InvalidURIError, RunNotFoundError
from cairn.storage.runs.records.layout import check_run_name, parse_ref
from cairn.storage.store.uri import parse_uri


@dataclass(frozen=True)
class RunPlace:
    """A run of a control plane, and the name of its root."""

    root: str
    run: str


@dataclass(frozen=True)
class StepPlace:
    """A step of a control plane, its run, and the name of the run's root."""

    root: str
    run: str
    step: int


def is_in_store(text: str) -> bool:
    """Return True if a text is a URI or path, and no name of the control plane."""
    place = text.partition("@")[0]  # after @ a metric's name may contain any character
    return "://" in place or place.startswith((".", "/"))


def resolve_address(client: Client, text: str, root: str | None) -> tuple[Address, str]:
    """Return the address that a text means, and the name of the run's root.

    Args:
        client: Client of the control plane.
        text: Address in any form.
        root: Value of --root; None: the root that the address names, else the only one that has
            the run.

    Raises:
        AddressError: The text is no address, several roots have the run, or --root contradicts it.
        InvalidURIError: The text is a malformed URI.
        NoCheckpointError: No root has the run.
        RunNotFoundError: The URI is in no root.
    """
    address = _of_uri(client, text) if is_in_store(text) else Address.parse(text)
    if root is not None and address.root not in (None, root):
        raise AddressError(f"{text!r} is in root {address.root!r}. Leave out --root {root}.")
    return address, root or address.root or find_root(client, address.run)


def resolve_run(client: Client, text: str, root: str | None) -> RunPlace:
    """Return the run that a text names; arguments and errors as for `resolve_address`.

    Raises:
        BadParameter: The text names a step.
    """
    address, name = resolve_address(client, check_run(text), root)
    return RunPlace(name, address.run)


def resolve_step(client: Client, text: str, root: str | None) -> StepPlace:
    """Return the step that a text names; arguments and errors as for `resolve_address`.

    Raises:
        NoCheckpointError, ProblemResponseError: See `find_step`.
    """
    address, name = resolve_address(client, text, root)
    return StepPlace(name, *find_step(client, address, name))


def resolve_checkpoint(client: Client, text: str, root: str | None) -> Checkpoint:
    """Return the checkpoint that a text names; arguments and errors as for `resolve_step`."""
    address, name = resolve_address(client, text, root)
    return find_checkpoint(client, address, name)


def check_address(text: str) -> None:
    """Check the form of an address before the control plane is asked.

    Raises:
        AddressError, InvalidURIError: The text is no address.
    """
    if is_in_store(text):
        parse_ref(text)
    else:
        Address.parse(text)


def names_run(text: str) -> bool:
    """Return True if an address names a run alone, without `@latest`.

    Raises:
        AddressError, InvalidURIError: The text is no address.
    """
    if text.endswith(f"@{LATEST}"):
        return False
    if not is_in_store(text):
        return Address.parse(text).is_run
    ref = parse_ref(text)
    return (ref.alias, ref.step, ref.best) == (None, None, None)


def check_run(text: str) -> str:
    """Return a text that names a run, and no step.

    Raises:
        BadParameter: It names a step.
        InvalidURIError: It is no name of a run.
    """
    try:
        is_run = names_run(text)
    except AddressError:
        check_run_name(text)  # its message says more of a name
        raise
    if not is_run:
        raise typer.BadParameter(f"expected a RUN alone, found a step of one: {text!r}")
    return text


def check_step(text: str) -> str:
    """Return a text that names a step by its number.

    Names that move from step to step are refused: a deletion must not depend on who moved them.

    Raises:
        AddressError: It names no step, or by another name than its number.
    """
    ref = parse_ref(text) if is_in_store(text) else Address.parse(text)
    if ref.step is None:
        raise AddressError(
            f"{text!r}: expected a step as RUN/steps/N, found another address. "
            f"`cairn checkpoints {ref.run}` lists the steps."
        )
    return text


def _of_uri(client: Client, text: str) -> Address:
    """Return the address of a URI or path in a root of the control plane."""
    ref = parse_ref(text)
    uris = {listed.name: listed.uri for listed in client.roots()}
    for name, uri in uris.items():
        try:
            is_root = parse_uri(uri) == ref.run.parent
        except InvalidURIError:  # of a scheme that this version does not know
            continue
        if is_root:
            return Address(ref.run.name, ref.alias, ref.step, ref.best, name)
    roots = ", ".join(f"{name} ({uri})" for name, uri in uris.items())
    raise RunNotFoundError(
        "no root of the control plane has this folder",
        path=ref.run,
        expected=f"one in the roots {roots}",
        found="another place",
        next_step="Add its root with `cairn roots add`.",
    )
