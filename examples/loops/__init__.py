"""Training loops as people have them; docs/howto/checkpoint-manager.md brings them to Cairn."""
