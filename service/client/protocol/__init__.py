"""Client side of the HTTP protocol: paths, headers, answers and retries; no I/O."""
