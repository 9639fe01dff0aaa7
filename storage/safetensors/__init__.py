"""The safetensors format: header, reading, and streamed writing in shards."""
