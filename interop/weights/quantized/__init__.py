"""Sources that dequantize published weights (FP8 and MXFP4) when they are read."""
