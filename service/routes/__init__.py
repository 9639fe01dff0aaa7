"""HTTP routes, one resource per file. `cairn.service.app` includes the `router` of each file."""
