"""Model classes: the built-in decoder, its base classes, the Linen twin, and imports from a hub."""
