"""Processes that the command runs itself: the server, a worker, a backup."""
