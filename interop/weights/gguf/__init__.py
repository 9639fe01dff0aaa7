"""GGUF files: read, written, and their tokenizers."""
