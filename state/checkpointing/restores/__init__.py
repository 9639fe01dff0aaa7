"""Reads of leaves for a restore: what to make of them, and which process reads which part."""
