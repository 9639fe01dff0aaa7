"""Checkpointer of training jobs: asynchronous saves and restores of JAX arrays."""

from cairn.installation import check_versions

check_versions()
