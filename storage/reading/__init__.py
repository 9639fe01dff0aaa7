"""Reading and verification of stored steps without JAX."""
