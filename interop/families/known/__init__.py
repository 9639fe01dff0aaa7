"""The families, a file for each, named by its `model_type`: what is here is known everywhere."""
