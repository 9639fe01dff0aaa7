"""Weights that were published quantized (FP8 and MXFP4), read as the plain model's."""
