"""Migrations, numbered, one file each."""
