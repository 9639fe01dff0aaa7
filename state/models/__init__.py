"""Base classes of models, in NNX and Linen: calls, loss, generation, sharding, logits.

Two modules here are programs, which nothing imports: `stored_logits` and `exported_logits` compute
logits of a stored step and of an export. `cairn convert --check-logits` runs them.
"""
