"""Cairn's control plane: HTTP, catalog, jobs, dashboard and the `cairn` command. Loads no JAX."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
