"""Reads of leaves: target descriptions, this process's reads, and shared reads."""
