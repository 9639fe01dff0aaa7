"""Rules between a model's leaves and a format's tensors, made from a table of names.

`decoder_layers` lists the leaves; a family only names its layers, and those that are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import Layer, LayerKind, block_layers, decoder_layers
from cairn.interop.conversion.ops import RENAME, TRANSPOSE, Chain, Op, Split, SplitGroups, Stack
from cairn.interop.conversion.rules import Rule, RuleTable

__all__ = ["EXPERTS", "SANDWICH", "Fused", "Names", "qkv_by_group"]


EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        f"mlp/experts/{name}": f"mlp.experts.{{number}}.{name}"
        for name in ("gate_proj", "up_proj", "down_proj")
    }
)
"""Usual names of the experts' layers, by their paths in a block."""


SANDWICH: Mapping[str, str] = MappingProxyType(
    {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
)
"""Names of norms, by their paths, in families with norms before and after attention and MLP."""


@dataclass(frozen=True)
class Fused:
    """Several linear layers that a file stores as one tensor, one after the other.

    Attributes:
        name: name of the tensor in a layer, without suffix.
        paths: paths of the linear layers in a block.
        op: function (config, name of the leaf) -> operation on the file's tensor; None: the tensor
            is split along its outputs.
    """

    name: str
    paths: tuple[str, ...]
    op: Callable[[DecoderConfig, str], Op] | None = None


@dataclass(frozen=True)
class Names:
    """Names of a family's layers in its files.

    Attributes:
        top: paths outside of the blocks -> their names in files.
        layer: name of a block, with "{layer}" for its number.
        layer_names: paths in a block -> names, for layers whose name is not the path with dots.
        fused: layers that are stored in one tensor.
        stacked: paths in a block -> name with "{number}", for leaves that files store as one tensor
            for each expert or head.
        kernel: operation from a linear layer's weight in files to our kernel.
        ops: paths in a block -> function (config, name of the leaf) -> operation, for layers with
            another operation than the usual.
        suffixes: paths in a block -> ending of the main leaf's tensor, if it is not ".weight".
        special: function (config, path of a block, its name) -> rules of the layers in
            `special_layers`.
        special_layers: paths in a block of layers that no attribute above fits.
        tolerated: regular expressions of tensors that may exist and are not read.
        optional_prefix: prefix of all names but the head's, which files of the base model lack.
        modules: names of layers in files -> names of their modules in transformers, if they differ;
            PEFT uses the latter.
        no_adapters: regular expressions (whole name) of modules that PEFT can't give adapters ->
            the reason.
    """

    top: Mapping[str, str] = field(
        default_factory=lambda: {
            "model/embed_tokens": "model.embed_tokens",
            "model/norm": "model.norm",
            "lm_head": "lm_head",
        }
    )
    layer: str = "model.layers.{layer}"
    layer_names: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[Fused, ...] = ()
    stacked: Mapping[str, str] = field(default_factory=lambda: EXPERTS)
    kernel: Op = TRANSPOSE
    ops: Mapping[str, Callable[[DecoderConfig, str], Op]] = field(default_factory=dict)
    suffixes: Mapping[str, str] = field(default_factory=dict)
    special: Callable[[DecoderConfig, str, str], list[Rule]] | None = None
    special_layers: frozenset[str] = frozenset()
    tolerated: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    optional_prefix: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    no_adapters: Mapping[str, str] = field(default_factory=dict)

    def rules(self, config: DecoderConfig) -> RuleTable:
        """Return the rule table of a model with this config."""
        whole = decoder_layers(config)
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

    def _of(self, path: str, layer: Layer, config: DecoderConfig) -> list[Rule]:
        rules = self._named(path, path, self.top[path], layer, config)
        if path != "lm_head":
            return rules
        return [replace(rule, op=TRANSPOSE) for rule in rules]  # always [out, in] in files

    def _layer(self, config: DecoderConfig, number: int) -> list[Rule]:
        layers = block_layers(config, number)
        block, prefix = f"model/layers/{number}", self.layer.format(layer=number)
        fused = {path: fusion for fusion in self.fused for path in fusion.paths if path in layers}
        rules: list[Rule] = []
        # Norms last: this is the order of tensors in exports, which must not change.
        for name in sorted(layers, key=lambda name: layers[name].kind is LayerKind.NORM):
            layer = layers[name]
            if name in fused:
                if name == fused[name].paths[0]:
                    rules += self._fused(block, prefix, fused[name], layers, config)
            elif name in self.stacked:
                rules += self._stacked(f"{block}/{name}", f"{prefix}.{self.stacked[name]}", layer)
            elif name in self.special_layers:
                continue
            else:
                dotted = self.layer_names.get(name, name.replace("/", "."))
                rules += self._named(f"{block}/{name}", name, f"{prefix}.{dotted}", layer, config)
        if self.special is not None:
            rules += self.special(config, block, prefix)
        return rules

    def _named(
        self, path: str, name: str, tensor: str, layer: Layer, config: DecoderConfig
    ) -> list[Rule]:
        """Return a rule for each leaf of a layer."""
        rules = []
        for leaf in layer.leaves:
            op: Op = RENAME
            if name in self.ops:
                op = self.ops[name](config, leaf)
            elif leaf == "kernel":
                op = self.kernel
            if not leaf:
                rules.append(Rule.one(path, tensor, op))
                continue
            suffix = ".bias" if leaf == "bias" else self.suffixes.get(name, ".weight")
            rules.append(Rule.one(f"{path}/{leaf}", f"{tensor}{suffix}", op))
        return rules

    def _fused(
        self,
        block: str,
        prefix: str,
        fused: Fused,
        layers: Mapping[str, Layer],
        config: DecoderConfig,
    ) -> list[Rule]:
        rules = []
        sizes = tuple(layers[name].shape[-1] for name in fused.paths)
        for leaf in layers[fused.paths[0]].leaves:
            op: Op = Chain((Split(sizes), self.kernel))
            if fused.op is not None:
                op = fused.op(config, leaf)
            elif leaf == "bias":
                op = Split(sizes)
            elif self.kernel is RENAME:
                op = Chain((RENAME, Split(sizes, axis=1)))
            suffix = "bias" if leaf == "bias" else "weight"
            paths = tuple(f"{block}/{name}/{leaf}" for name in fused.paths)
            rules.append(Rule(paths, (f"{prefix}.{fused.name}.{suffix}",), op))
        return rules

    def _stacked(self, path: str, tensor: str, layer: Layer) -> list[Rule]:
        count = layer.shape[0]
        stack: Op = Stack(count)
        rules = []
        for leaf in layer.leaves:
            suffix = "bias" if leaf == "bias" else "weight"
            names = tuple(f"{tensor.format(number=number)}.{suffix}" for number in range(count))
            op = Chain((self.kernel, stack)) if leaf == "kernel" else stack
            rules.append(Rule((f"{path}/{leaf}",), names, op))
        return rules


def qkv_by_group(name: str) -> Fused:
    """Return the fusion of queries, keys and values by group: its queries, its key, its value.

    A group is a key/value head with the query heads that share it.

    Args:
        name: name of the tensor in a layer, without suffix.
    """

    def split(config: DecoderConfig, leaf: str) -> Op:
        size, heads = config.head_size, config.num_attention_heads // config.kv_heads
        groups = SplitGroups(config.kv_heads, (heads * size, size, size))
        return groups if leaf == "bias" else Chain((groups, TRANSPOSE))

    return Fused(name, tuple(f"self_attn/{part}_proj" for part in "qkv"), split)
