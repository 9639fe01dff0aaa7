"""Charts drawn on the server, as numbers, SVG or PNG. The functions are pure."""
