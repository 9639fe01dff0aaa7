"""Cairn's control plane: HTTP, catalog, jobs, dashboard and the `cairn` command. Loads no JAX."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "app": ["create_app"],
        "client": ["CairnClient"],
        "errors": ["ServiceError", "SettingsError"],
        "settings": ["Settings"],
    },
)
