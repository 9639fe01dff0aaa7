"""HTTP routes, one resource a file; each exports `router`, which `cairn.service.app` includes."""
