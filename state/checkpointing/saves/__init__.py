"""The stations of a save: check, staging on the host, write, commit by Orbax, publication."""
