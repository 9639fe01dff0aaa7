"""Weights in files of other tools: safetensors, torch, GGUF, PEFT, FP8 and MXFP4; and exports."""
