"""Command line of Cairn: the `cairn` command, its output and its processes."""
