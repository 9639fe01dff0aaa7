"""gelu as llama.cpp computes it, in models of transformers."""

import torch

LIMIT_OF_ITS_GELU = 1e-3
"""Of the largest logit. A last bit decides which entry of its table llama.cpp takes for gelu."""


class TableGelu(torch.nn.Module):
    """gelu as llama.cpp computes it on a CPU: in a table from 16-bit numbers to 16-bit numbers."""

    def forward(self, values):
        entries = torch.nn.functional.gelu(values.half().float(), approximate="tanh")
        near = entries.half().to(values.dtype)
        return torch.where(values.abs() < 10, near, values.relu())


def is_gelu(module):
    """Whether a module of a transformers model is a gelu of any kind."""
    kind = type(module)
    return kind.__module__.endswith("activations") and "gelu" in kind.__name__.lower()


def with_its_gelu(theirs):
    """A transformers model that computes gelu as llama.cpp does."""
    for module in [*theirs.modules()]:
        for name, child in [*module.named_children()]:
            if is_gelu(child):
                setattr(module, name, TableGelu())
    return theirs
