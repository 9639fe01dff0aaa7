"""Rules between our leaves and transformers' tensors, made of a table of names. JAX-free.

The leaves are those that `decoder_parts` lists, so that no rule is written twice: a family says
what its layers are called, and which of them lie fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_parts import Part, PartKind, decoder_parts, layer_parts
from cairn.interop.conversion.ops import RENAME, TRANSPOSE, Chain, Op, Split, Stack
from cairn.interop.conversion.rules import Rule, RuleTable

__all__ = ["EXPERTS", "SANDWICH", "Fused", "Names", "fused_op"]


EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        f"mlp/experts/{name}": f"mlp.experts.{{number}}.{name}"
        for name in ("gate_proj", "up_proj", "down_proj")
    }
)
"""Names that most families give the layers of their experts."""


SANDWICH: Mapping[str, str] = MappingProxyType(
    {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
)
"""Names of norms in families that normalise on both sides of attention and MLP."""


@dataclass(frozen=True)
class Fused:
    """Several linear layers of ours that are one of theirs, one after the other.

    Attributes:
        theirs: its name in a layer.
        ours: their paths in a block.
        op: another operation than to cut it: (config, name of the leaf) -> operation, which is
            given their tensor as it lies.
    """

    theirs: str
    ours: tuple[str, ...]
    op: Callable[[DecoderConfig, str], Op] | None = None


@dataclass(frozen=True)
class Names:
    """Names of a family's layers in its files.

    Attributes:
        top: paths of ours outside of the blocks -> their names.
        layer: of a block, with "{layer}" for its number.
        parts: paths in a block -> their names in it, where these are not the paths with dots.
        fused: layers that lie in one tensor.
        stacked: paths in a block of what is one tensor for each expert, or head, of theirs -> its
            name, with "{number}".
        kernel: from a linear layer's weight of theirs to our kernel.
        ops: paths in a block -> another operation: (config, name of the leaf) -> operation.
        suffixes: paths in a block whose main leaf has another ending than ".weight" -> it.
        special: (config, path of a block, its name) -> rules of parts that nothing above fits.
        special_parts: paths in a block of those parts.
        tolerated: regular expressions of tensors that may be there and follow from the config.
        optional_prefix: of all names but the head's; files of the base model lack it.
        modules: names of layers in files -> their names in transformers, which PEFT goes by, where
            these are others.
        no_adapters: regular expressions (whole name) of modules that PEFT can't give adapters, and
            why it can't.
    """

    top: Mapping[str, str] = field(
        default_factory=lambda: {
            "model/embed_tokens": "model.embed_tokens",
            "model/norm": "model.norm",
            "lm_head": "lm_head",
        }
    )
    layer: str = "model.layers.{layer}"
    parts: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[Fused, ...] = ()
    stacked: Mapping[str, str] = field(default_factory=lambda: EXPERTS)
    kernel: Op = TRANSPOSE
    ops: Mapping[str, Callable[[DecoderConfig, str], Op]] = field(default_factory=dict)
    suffixes: Mapping[str, str] = field(default_factory=dict)
    special: Callable[[DecoderConfig, str, str], list[Rule]] | None = None
    special_parts: frozenset[str] = frozenset()
    tolerated: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    optional_prefix: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    no_adapters: Mapping[str, str] = field(default_factory=dict)

    def rules(self, config: DecoderConfig) -> RuleTable:
        """Return the table of a config."""
        whole = decoder_parts(config)
        rules = self._of("model/embed_tokens", whole["model/embed_tokens"], config)
        if "model/embed_positions" in whole:
            rules += self._of("model/embed_positions", whole["model/embed_positions"], config)
        for number in range(config.num_hidden_layers):
            rules += self._layer(config, number)
        rules += self._of("model/norm", whole["model/norm"], config)
        tolerated, aliases = list(self.tolerated), {}
        head = f"{self.top['lm_head']}.weight"
        if config.tie_word_embeddings:
            tolerated.append(head.replace(".", r"\."))
            aliases[head] = f"{self.top['model/embed_tokens']}.weight"
        else:
            rules += self._of("lm_head", whole["lm_head"], config)
        return RuleTable(tuple(rules), tuple(tolerated), aliases)

    def _of(self, path: str, part: Part, config: DecoderConfig) -> list[Rule]:
        rules = self._named(path, path, self.top[path], part, config)
        if path != "lm_head":
            return rules
        return [replace(rule, op=TRANSPOSE) for rule in rules]  # [out, in] wherever others lie

    def _layer(self, config: DecoderConfig, number: int) -> list[Rule]:
        parts = layer_parts(config, number)
        ours, theirs = f"model/layers/{number}", self.layer.format(layer=number)
        fused = {name: one for one in self.fused for name in one.ours if name in parts}
        rules: list[Rule] = []
        # Norms last: exports keep the order of their tensors.
        for name in sorted(parts, key=lambda name: parts[name].kind is PartKind.NORM):
            part = parts[name]
            if name in fused:
                if name == fused[name].ours[0]:
                    rules += self._fused(ours, theirs, fused[name], parts, config)
            elif name in self.stacked:
                rules += self._stacked(f"{ours}/{name}", f"{theirs}.{self.stacked[name]}", part)
            elif name in self.special_parts:
                continue
            else:
                dotted = self.parts.get(name, name.replace("/", "."))
                rules += self._named(f"{ours}/{name}", name, f"{theirs}.{dotted}", part, config)
        if self.special is not None:
            rules += self.special(config, ours, theirs)
        return rules

    def _named(
        self, path: str, name: str, theirs: str, part: Part, config: DecoderConfig
    ) -> list[Rule]:
        """Return a rule for each leaf of a part."""
        rules = []
        for leaf in part.leaves:
            op: Op = RENAME
            if name in self.ops:
                op = self.ops[name](config, leaf)
            elif leaf == "kernel":
                op = self.kernel
            if not leaf:
                rules.append(Rule.one(path, theirs, op))
                continue
            suffix = ".bias" if leaf == "bias" else self.suffixes.get(name, ".weight")
            rules.append(Rule.one(f"{path}/{leaf}", f"{theirs}{suffix}", op))
        return rules

    def _fused(
        self,
        ours: str,
        theirs: str,
        fused: Fused,
        parts: Mapping[str, Part],
        config: DecoderConfig,
    ) -> list[Rule]:
        rules = []
        for leaf in parts[fused.ours[0]].leaves:
            if fused.op is not None:
                op = fused.op(config, leaf)
            else:
                op = fused_op([parts[name] for name in fused.ours], leaf, self.kernel)
            suffix = "bias" if leaf == "bias" else "weight"
            paths = tuple(f"{ours}/{name}/{leaf}" for name in fused.ours)
            rules.append(Rule(paths, (f"{theirs}.{fused.theirs}.{suffix}",), op))
        return rules

    def _stacked(self, path: str, theirs: str, part: Part) -> list[Rule]:
        count = part.shape[0]
        stack: Op = Stack(count)
        rules = []
        for leaf in part.leaves:
            suffix = "bias" if leaf == "bias" else "weight"
            names = tuple(f"{theirs.format(number=number)}.{suffix}" for number in range(count))
            op = Chain((self.kernel, stack)) if leaf == "kernel" else stack
            rules.append(Rule((f"{path}/{leaf}",), names, op))
        return rules


def fused_op(parts: Sequence[Part], leaf: str, kernel: Op) -> Op:
    """Return the operation that splits a fused weight or bias by the layers' outputs."""
    sizes = tuple(part.shape[-1] for part in parts)
    if leaf == "bias":
        return Split(sizes)
    return (
        Chain((kernel, Split(sizes, axis=1))) if kernel is RENAME else Chain((Split(sizes), kernel))
    )
