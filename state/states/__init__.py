"""Saving and loading of training states: what a checkpoint holds, and how it comes back."""
