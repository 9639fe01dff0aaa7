"""Weights in files of other tools: safetensors folders, GGUF, PEFT and exports."""
