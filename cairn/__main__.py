"""`python -m cairn` is the `cairn` command."""

from cairn.service.command.cli import main

if __name__ == "__main__":
    main()
