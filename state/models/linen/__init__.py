"""Models in Flax Linen: their base class, and the one decoder in its Linen form."""
