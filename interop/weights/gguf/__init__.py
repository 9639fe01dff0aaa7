"""Reader and writer of GGUF files, and of the tokenizers in them."""
