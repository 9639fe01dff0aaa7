"""Pages of a run: steps and curves, aliases, lineage, storage, writer."""
