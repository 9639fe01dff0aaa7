"""Conversion of models in memory from and to Hugging Face's formats, one weight at a time."""
