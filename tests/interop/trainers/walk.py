"""Mistakes in a map, one at a time, and what tells of each: the shapes, or the trainer's logits."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import transformers

from cairn.interop.config.decoder_layers import leaf_shapes
from cairn.interop.conversion.layout_ops import Merge, Permute, Unstack
from cairn.interop.conversion.ops import TRANSPOSE, Chain, RotaryRows
from cairn.interop.conversion.rules import Rule, RuleTable, match
from cairn.interop.conversion.value_ops import Plus, Times
from cairn.interop.errors import ConversionError
from cairn.interop.families.family import get_family
from cairn.interop.trainers.mapped_model import MappedModel, map_model
from cairn.state.models.exported_logits import round_tied_head
from tests.trainers.kept import kept, reference

TOLERANCE = 1e-4


class KeptModel:
    """A kept tree, its map, and the model of transformers that its leaves are loaded into."""

    def __init__(self, name: str) -> None:
        arrays, told = kept(name)
        items: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, array in arrays.items():
            item, _, path = key.partition("/")
            items.setdefault(item, {})[path] = array.shape
        self.map: MappedModel = map_model(items, told, path=name)
        tree = self.map.tree
        self.arrays = {
            path: arrays[f"{tree.item}/{tree.root}{path}"] for path in self.map.tree.shapes
        }
        self.tokens, self.expected = reference(name)
        config = self.map.config.to_hf()
        kind = transformers.AutoConfig.for_model(**config, attn_implementation="eager")
        self.model = transformers.AutoModelForCausalLM.from_config(kind).eval()

    def fits(self, rules: tuple[Rule, ...]) -> bool:
        """Return whether the shapes of stored leaves and of ours allow the rules."""
        try:
            match(
                RuleTable(rules),
                leaves=leaf_shapes(self.map.config),
                tensors=self.map.tree.shapes,
                path="mutant",
            )
        except ConversionError:
            return False
        return True

    def difference(self, rules: tuple[Rule, ...]) -> float:
        """Return how far the logits by these rules are from the trainer's, relative to these."""
        self.load_leaves(rules)
        if self.map.head_rounding is not None:
            round_tied_head(self.model, *self.map.head_rounding)
        with torch.no_grad():
            logits = self.model(torch.from_numpy(self.tokens)).logits.numpy()
        expected = self.expected[..., : logits.shape[-1]]
        return float(np.abs(logits - expected).max() / np.abs(expected).max())

    def load_leaves(self, rules: tuple[Rule, ...]) -> None:
        """Load the leaves that these rules make into the model of transformers."""
        leaves: dict[str, np.ndarray] = {}
        for rule in rules:
            made = rule.op.from_hf([self.arrays[name] for name in rule.tensors])
            leaves |= dict(zip(rule.leaves, made, strict=True))
        tensors: dict[str, torch.Tensor] = {}
        for rule in get_family(self.map.config.model_type).rules(self.map.config).rules:
            written = rule.op.to_hf([leaves[name] for name in rule.leaves])
            tensors |= {
                name: torch.from_numpy(np.ascontiguousarray(array, np.float32))
                for name, array in zip(rule.tensors, written, strict=True)
            }
        load(self.model, tensors)


def load(model, tensors):
    """Load tensors under their names in files; experts, which files keep apart, are stacked."""
    own = dict(model.state_dict())
    grouped: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            own[name.replace("block_sparse_moe", "mlp")].copy_(tensor)
            continue
        layer, _, rest = name.partition(".experts.")
        number, kind, _ = rest.split(".")
        grouped.setdefault(layer, {}).setdefault(int(number), {})[kind] = tensor
    for layer, experts in grouped.items():
        prefix = f"{layer.replace('block_sparse_moe', 'mlp')}.experts"
        for number, parts in experts.items():
            both = torch.cat([parts["w1"], parts["w3"]])
            own[f"{prefix}.gate_up_proj"][number].copy_(both)
            own[f"{prefix}.down_proj"][number].copy_(parts["w2"])


class Walk(NamedTuple):
    """Mistakes of a map: how many were tried, how many shapes refuse, and those not found."""

    tried: int
    by_shapes: int
    survivors: list[str]


def walk(model: KeptModel) -> Walk:
    """Try each mistake of a model's map, by shapes and then by the trainer's logits."""
    survivors, by_shapes, tried = [], 0, 0
    for mistake, rules in mutants(model.map.rules):
        tried += 1
        if not model.fits(rules):
            by_shapes += 1
        elif model.difference(rules) <= 10 * TOLERANCE:
            survivors.append(mistake)
    print(f"{model.map.layout}: {tried} mistakes, {by_shapes} found by shapes")
    return Walk(tried, by_shapes, survivors)


def mutants(rules: tuple[Rule, ...]) -> Iterator[tuple[str, tuple[Rule, ...]]]:
    """Yield a name and the rules with one mistake, for each operation and for each neighbour."""
    for number, rule in enumerate(rules):
        ops = rule.op.ops if isinstance(rule.op, Chain) else (rule.op,)

        def changed(name, *ops, number=number, rule=rule):
            mutant = replace(rule, op=Chain(ops) if ops else TRANSPOSE)
            return f"{rule.tensors[0]}: {name}", (*rules[:number], mutant, *rules[number + 1 :])

        for at, op in enumerate(ops):
            before, after = ops[:at], ops[at + 1 :]
            if isinstance(op, Unstack):
                other = 1 - op.axis if op.axis < 2 else 0
                yield changed("another axis", *before, Unstack(op.count, other), *after)
                turned = replace(rule, leaves=tuple(reversed(rule.leaves)))
                yield (
                    f"{rule.tensors[0]}: layers reversed",
                    (*rules[:number], turned, *rules[number + 1 :]),
                )
            elif isinstance(op, Merge) and min(op.sizes) > 1:
                axes = [*range(op.axis + 2 + (op.axis == 0 and ".out" not in rule.tensors[0]))]
                axes[op.axis], axes[op.axis + 1] = op.axis + 1, op.axis
                mixed = Permute(tuple(axes)), Merge(op.sizes[::-1], op.axis)
                yield changed("heads within their sizes", *before, *mixed, *after)
            elif isinstance(op, RotaryRows):
                yield changed("no rotary order", *before, *after)
                yield changed("all as one head", *before, RotaryRows(1), *after)
            elif isinstance(op, Times):
                yield changed("no factor", *before, *after)
                yield changed("factor inverted", *before, Times(1 / op.number), *after)
            elif isinstance(op, Plus):
                yield changed("no offset", *before, *after)
                yield changed("offset added", *before, Plus(-op.number), *after)
            elif isinstance(op, Permute):
                yield changed("axes as stored", *before, *after)
        for other, neighbour in enumerate(rules[number + 1 :], number + 1):
            if neighbour.op == rule.op and len(neighbour.leaves) == len(rule.leaves):
                swapped = [*rules]
                swapped[number] = replace(rule, tensors=neighbour.tensors)
                swapped[other] = replace(neighbour, tensors=rule.tensors)
                yield f"{rule.tensors[0]} for {neighbour.tensors[0]}", tuple(swapped)
                break
