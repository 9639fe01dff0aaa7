"""Placement of a step on a mesh, planned from its index alone, without devices."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.errors import ArgumentError, ConfigError, InteropError
from cairn.interop.partition_axis import MESH_AXES, entry_axes
from cairn.interop.placement import specs, step_plan
from cairn.interop.placement.process_grid import ProcessGrid
from cairn.interop.placement.rules import RuleMatch, SpecProblem, axis_units
from cairn.interop.placement.step_plan import Layout
from cairn.service.actions.caches import OpenStep
from cairn.service.errors import InvalidRequestError
from cairn.service.jobs.rule_matches import Matches, match_rules
from cairn.service.schemas import (
    DeviceBytes,
    Misfit,
    PlacedBy,
    PlacementRule,
    PlannedLeaf,
    PlanRequest,
    StepName,
    StepPlan,
)
from cairn.storage.arrays.orbax_tree import META_ITEM
from cairn.storage.errors import LeafNotFoundError
from cairn.storage.runs.records.manifest import Manifest

_STATE_ITEMS: Final = ("model", "optimizer", "fields")
"""Items that `load_state` loads."""

_DECODER: Final = "DecoderForCausalLM"


@dataclass
class _PlanTarget:
    """Checked plan request: mesh, layout, and remarks.

    Attributes:
        grid: The mesh.
        layout: Layout that places the leaves.
        placed_by: Source of the layout, as one word.
        items: Items to load.
        particular: Patterns of the rules that do not match every path.
        notes: Remarks on the plan.
        problems: Reasons why the checkpoint cannot be loaded on this mesh.
    """

    grid: ProcessGrid
    layout: Layout
    placed_by: PlacedBy
    items: list[str]
    particular: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def plan_step(
    step: OpenStep, name: StepName, uri: str, body: PlanRequest, *, after: int, limit: int | None
) -> tuple[StepPlan, bool]:
    """Plan a step on a mesh; return the plan, and whether there are more leaves.

    Args:
        step: The step.
        name: Name of the step.
        uri: URI for `load_state`.
        body: Mesh and options.
        after: Number of leaves that the client has.
        limit: Largest number of leaves to name; None: all.

    Raises:
        InvalidRequestError: The mesh or the rules are invalid.
        LeafNotFoundError: The step has no such item.
    """
    target = _plan_target(step, body)
    plan = step_plan.plan_step(
        step.contents.leaves,
        target.grid,
        target.layout,
        items=target.items,
        param_dtype=body.dtype,
        local=step.uri.scheme == "file",
    )
    leaves = sorted(
        plan.leaves, key=lambda leaf: (not leaf.problems, leaf.record.item, leaf.record.path)
    )
    page = leaves[after:] if limit is None else leaves[after : after + limit]
    taking = {leaf.rule for leaf in plan.leaves}
    idle = [text for text in target.particular if text not in taking]
    device = {
        "model": plan.bytes_per_device(step_plan.MODEL_ITEMS),
        "optimizer": plan.bytes_per_device({"optimizer"}),
    }
    total = plan.bytes_per_device()
    fits = not plan.problems and not target.problems
    load = _load_call(step.manifest, uri, body, target) if fits else None
    target.notes.extend(_notes(step.manifest, body, plan.leaves))
    answer = StepPlan(
        step=name.model_copy(update={"manifest_digest": step.manifest_digest}),
        mesh=dict(target.grid.sizes),
        devices=target.grid.devices,
        processes=target.grid.processes,
        fits=fits,
        misfits=len(plan.problems),
        problems=target.problems,
        placed_by=target.placed_by,
        notes=target.notes,
        bytes=plan.nbytes,
        bytes_per_device=DeviceBytes(**device, other=total - sum(device.values()), total=total),
        host_bytes=plan.cost.host,
        read_bytes=plan.cost.read,
        read_bytes_in_all=plan.cost.read_in_all,
        idle_rules=idle,
        load=load,
        leaves=[_leaf(leaf, target.grid) for leaf in page],
    )
    return answer, len(leaves) > after + len(page)


def plan_leaf(step: OpenStep, item: str, path: str, body: PlanRequest) -> PlannedLeaf | None:
    """Plan one leaf of a step on a mesh; None: no layout is known, or a load leaves it out.

    Args:
        step: The step.
        item: Item of the leaf.
        path: Path of the leaf.
        body: Mesh and options.

    Raises:
        InvalidRequestError: The mesh or the rules are invalid.
    """
    target = _plan_target(step, body)
    if target.placed_by == "nothing" or item not in target.items:
        return None
    plan = step_plan.plan_step(
        step.contents.leaves, target.grid, target.layout, items=[item], param_dtype=body.dtype
    )
    leaves = (leaf for leaf in plan.leaves if leaf.record.path == path)
    return next((_leaf(leaf, target.grid) for leaf in leaves), None)


def _plan_target(step: OpenStep, body: PlanRequest) -> _PlanTarget:
    manifest = step.manifest
    config, why = _config(manifest)
    sizes = dict(body.mesh.axes)
    if body.rules is None:
        sizes = _complete_mesh(sizes)
    try:
        grid = ProcessGrid(sizes, body.mesh.processes)
    except ArgumentError as exc:
        problems = [{"field": "body.mesh", "detail": text} for text in exc.problems]
        raise InvalidRequestError(str(exc), errors=problems) from exc
    items = _items(step, body.items)
    target = _PlanTarget(grid, Layout(), "nothing", items)
    more: dict[str, Any] = {}
    if config is not None:
        axis = config.partition_axis
        more = {"named": True, "units": axis_units(config)}
        more |= {} if axis is None else {"axis_rules": axis.axis_rules()}
        target.layout, target.placed_by = Layout(**more), "axis_names"
        target.problems += _refusals(config, sizes)
    if body.rules is not None:
        matches = _matches(step, body.rules, sizes)
        target.layout, target.placed_by = Layout(_rule_finder(body.rules, matches), **more), "rules"
        catch_all = zip(body.rules, matches.catch_all, strict=True)
        target.particular = [text for (text, _), every in catch_all if not every]
    elif config is None:
        target.notes.append(f"{why}: without sharding rules every tensor is replicated")
    return target


def _config(manifest: Manifest) -> tuple[DecoderConfig | None, str]:
    """Return the model's configuration, if it is the decoder's; else the reason why not."""
    model = manifest.model
    if model is None or not model.config:
        return None, "No model config"
    if model.model_class != _DECODER:
        return None, f"the axis names of {model.model_class} are not known here"
    try:
        config = AutoEasyDeLConfig.from_dict(model.config)
    except ConfigError as exc:
        return None, f"the model's configuration can't be read ({exc})"
    if not isinstance(config, DecoderConfig):
        return None, f"the axis names of a {model.model_type} are not known here"
    return config, ""


def _complete_mesh(sizes: dict[str, int]) -> dict[str, int]:
    """Add the missing axes to a mesh, at their usual places if it has the usual order."""
    usual = [axis for axis in MESH_AXES if axis in sizes]
    if list(sizes) == usual:
        return {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    return sizes | {axis: 1 for axis in MESH_AXES if axis not in sizes}


def _refusals(config: DecoderConfig, sizes: dict[str, int]) -> list[str]:
    """Return the reasons why the model's configuration refuses a mesh, as a load would."""
    try:
        config.replace(
            sharding_axis_dims=tuple(sizes.values()),
            sharding_axis_names=tuple(sizes),
            sharding_dcn_axis_dims=None,
        )
    except InteropError as exc:
        return [str(exc)]
    return []


def _items(step: OpenStep, requested: Iterable[str] | None) -> list[str]:
    present = dict.fromkeys([*step.manifest.items, *(leaf.item for leaf in step.contents.leaves)])
    if requested is None:
        state = [item for item in present if item in _STATE_ITEMS]
        return state if "model" in state else list(present)
    unknown = [item for item in requested if item not in present]
    if unknown:
        raise LeafNotFoundError(
            "no such item",
            path=step.uri,
            expected=f"some of {sorted(present)}",
            found=", ".join(map(repr, unknown)),
            next_step="Ask for some of these.",
        )
    return list(dict.fromkeys(requested))


def _matches(step: OpenStep, rules: list[PlacementRule], sizes: dict[str, int]) -> Matches:
    """Match the rules with the leaves.

    Raises:
        InvalidRequestError: Rules name unknown axes, or one twice; all are listed. Or a pattern is
            invalid, or takes too long.
    """
    problems = []
    for number, (text, spec) in enumerate(rules):
        axes = [axis for entry in spec for axis in entry_axes(entry)]
        errors = [
            f"unknown mesh axis {axis!r}" for axis in dict.fromkeys(axes) if axis not in sizes
        ]
        twice = [axis for axis in dict.fromkeys(axes) if axes.count(axis) > 1]
        errors += [f"mesh axis {axis!r} twice" for axis in twice]
        problems += [
            {"field": f"body.rules.{number}", "detail": f"{text!r}: {error}"} for error in errors
        ]
    if problems:
        details = "; ".join(problem["detail"] for problem in problems)
        have = specs.mesh_text(sizes)
        raise InvalidRequestError(
            f"rules: use axes of the mesh ({have}), each once: {details}", errors=problems
        )
    leaves = step.contents.leaves
    items = step_plan.ruled_items(leaves)
    paths = {step_plan.readable(leaf.path) for leaf in leaves if leaf.item in items}
    return match_rules([text for text, _ in rules], sorted(paths))


def _rule_finder(rules: list[PlacementRule], matches: Matches) -> Callable[[str], RuleMatch]:
    """Return a function that returns the rule of a leaf, given its path."""
    specs = [_entries(spec) for _, spec in rules]

    def find(path: str) -> RuleMatch:
        number = matches.first[path]
        if number is None:
            return RuleMatch(None)
        return RuleMatch(rules[number][0], specs[number], matches.catch_all[number])

    return find


def _entries(spec: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in spec)


def _leaf(leaf: step_plan.PlannedLeaf, grid: ProcessGrid) -> PlannedLeaf:
    record = leaf.record
    return PlannedLeaf(
        item=record.item,
        path=record.path,
        shape=list(record.shape),
        dtype=leaf.dtype,
        spec=[list(entry) if isinstance(entry, tuple) else entry for entry in leaf.entries],
        part=list(leaf.shard_shape),
        bytes=leaf.nbytes,
        bytes_per_device=leaf.bytes_per_device,
        rule=leaf.rule,
        misfits=[_misfit(misfit, record.shape, grid) for misfit in leaf.problems],
        unmatched=leaf.unmatched,
    )


def _misfit(misfit: SpecProblem, shape: tuple[int, ...], grid: ProcessGrid) -> Misfit:
    is_on_mesh = bool(misfit.axes) and all(axis in grid.sizes for axis in misfit.axes)
    return Misfit(
        detail=misfit.text,
        dimension=misfit.dimension,
        length=None if misfit.dimension is None else shape[misfit.dimension],
        axes=list(misfit.axes),
        parts=specs.shard_count(misfit.axes, grid.sizes) if is_on_mesh else None,
    )


def _notes(
    manifest: Manifest, body: PlanRequest, leaves: Iterable[step_plan.PlannedLeaf]
) -> list[str]:
    """Return remarks on the numbers of a plan."""
    leaves = list(leaves)
    notes = []
    large = sum(leaf.unmatched is not None for leaf in leaves)
    if large:
        notes.append(
            f"{large} large leaves are replicated on every device because no sharding rule matches"
        )
    if any(leaf.record.dtype.endswith(("int4", "int2", "e2m1fn")) for leaf in leaves):
        notes.append(
            "elements smaller than a byte are counted as one byte, as hosts and CPU devices have "
            "them; accelerators may pack them"
        )
    items = {leaf.record.item for leaf in leaves}
    if "optimizer" in items and _is_state(manifest):
        notes.append("pass tx= to load_state unless the optimizer came from make_optimizer")
    if body.dtype is not None and "optimizer" in items:
        notes.append(
            "moments with the dtype of their parameter are assumed to follow it, as Optax does "
            "unless a moment has a dtype of its own"
        )
    if body.dtype == "float64":
        notes.append("float64 needs jax_enable_x64")
    if "fields" in items:
        notes.append(
            "call load_state on the class that adds the fields; those that are Python numbers "
            "count as arrays"
        )
    if _is_state(manifest) and not _is_loadable(items):
        notes.append("load_state loads the item model, with or without optimizer and fields")
    if not _is_state(manifest):
        notes.append(
            "load_state can't load it: give cairn.load a target of jax.ShapeDtypeStruct with "
            "these placements"
        )
    return notes


def _is_state(manifest: Manifest) -> bool:
    """Return whether `load_state` can rebuild the model and the state around it."""
    model = manifest.model
    named = model is not None and model.model_class is not None and bool(model.config)
    return named and META_ITEM in manifest.items and manifest.plain is None


def _is_loadable(items: Collection[str]) -> bool:
    """Return whether `load_state` can load exactly these items."""
    return "model" in items and set(items) <= set(_STATE_ITEMS)


def _load_call(manifest: Manifest, uri: str, body: PlanRequest, target: _PlanTarget) -> str | None:
    """Return Python code that loads a step as planned; None: `load_state` cannot load the items."""
    if not _is_state(manifest) or not _is_loadable(target.items):
        return None
    sizes = target.grid.sizes
    arguments = [repr(uri), "auto_shard_model=True"]
    arguments.append(f"sharding_axis_dims={tuple(sizes.values())!r}")
    if tuple(sizes) != MESH_AXES:
        arguments.append(f"sharding_axis_names={tuple(sizes)!r}")
    rules = body.rules
    if target.placed_by == "nothing":
        rules = [(".*", [])]
    if rules is not None:
        arguments.append(f"partition_rules=[{', '.join(map(_rule_text, rules))}]")
    if body.dtype is not None:
        arguments.append(f"param_dtype={body.dtype!r}")
    left = [item for item in manifest.items if item not in target.items]
    arguments += [f'{item}="skip"' for item in ("optimizer", "fields") if item in left]
    imports = ["from cairn import EasyDeLState"]
    if rules is not None:
        imports.append("from jax.sharding import PartitionSpec")
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return "\n".join([*imports, "", f"state = EasyDeLState.load_state(\n{lines})", ""])


def _rule_text(rule: tuple[str, list[Any]]) -> str:
    text, spec = rule
    return f"({text!r}, PartitionSpec({', '.join(map(repr, _entries(spec)))}))"
