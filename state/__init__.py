"""Training on JAX: states, models, sharding, optimizers, and the checkpointer that saves them."""
