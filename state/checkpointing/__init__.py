"""Saves and restores of training jobs. Imports JAX and Orbax."""

import lazy_loader

from cairn.installation import check_versions

check_versions()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
