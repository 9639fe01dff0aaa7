"""What the command runs itself, beside no server: the server, a worker, a backup."""
