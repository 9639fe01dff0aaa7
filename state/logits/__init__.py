"""Programs that compute a model's logits, in processes of their own: ours, and those of an export.

Nothing imports them; `cairn convert --check-logits` runs them.
"""
