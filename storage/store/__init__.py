"""Bytes and small objects in any store: addresses, conditional writes, files, checksums."""
