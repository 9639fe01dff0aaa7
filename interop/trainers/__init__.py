"""Trees that other trainers store, and the operations that make a known model of them."""
