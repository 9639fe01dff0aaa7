"""Records of a run, one kind per module: their names and fields, their reads and writes."""
