"""Records of a run, one kind per file: names, fields, and how they are read and written."""
