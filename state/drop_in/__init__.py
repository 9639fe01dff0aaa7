"""Orbax's `CheckpointManager` on a Cairn run, for loops that call it. Imports JAX and Orbax.

checkpoint_manager   the class, with Orbax's methods
stored_items         the items that a step has, as the manager stores them
item_args            Orbax's arguments for items, as trees and JSON, and back
step_policies        Orbax's options: when to save, what to keep, and which are refused
"""
