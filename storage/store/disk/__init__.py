"""Local disk: confinement of paths, durable directory entries, file locks and direct I/O."""
