"""Pages for people: server-rendered, with one small script that follows operations."""
