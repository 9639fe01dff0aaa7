"""Base classes of models, in NNX and Linen: calls, loss, generation, sharding, logits.

Programs that compute logits in a process of their own, of a stored step or of an export, lie here
too: nothing imports them; `cairn convert --check-logits` runs them.
"""
