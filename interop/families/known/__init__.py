"""The families: one module for each, named by its `model_type`."""
