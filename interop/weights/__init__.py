"""Weights in other people's files: safetensors folders, GGUF, PEFT and exports."""
