"""Reasons for which a test of Orbax's manager says nothing against ours: a row is (pattern, reason)."""

DOCUMENTED: list[tuple[str, str]] = []
"""By name of the test: a part of docs/howto/checkpoint-manager.md that says the same."""

INTERNAL: list[tuple[str, str]] = []
"""By name of the test: the private part of Orbax that it looks at."""
