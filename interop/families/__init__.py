"""Model families: for each, a reader and a writer of config.json, and rules for its tensors."""
