"""HTTP routes, one resource a file; each exports `router`, which `service.app` includes."""
