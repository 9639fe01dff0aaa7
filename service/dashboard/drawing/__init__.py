"""Charts as numbers and SVG: what is drawn on the server, from data alone."""
