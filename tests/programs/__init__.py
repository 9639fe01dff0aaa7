"""Python programs that tests start, without the seconds that their imports take."""
