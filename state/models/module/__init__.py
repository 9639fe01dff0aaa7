"""Capabilities of every NNX model: sharding, adaptation, loss, generation, state."""
