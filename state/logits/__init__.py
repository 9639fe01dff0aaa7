"""Programs that compute logits in a process of their own: of a stored step, or of an export.

Nothing imports them; `cairn convert --check-logits` runs them.
"""
