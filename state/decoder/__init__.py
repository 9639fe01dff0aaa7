"""The one decoder: every family is a set of its options."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "cache": ["KVCache"],
        "config": ["DecoderConfig", "RopeConfig"],
        "decoder": ["DecoderForCausalLM"],
    },
)
