"""A local disk: what may be opened there, names it holds, locks, bytes past its page cache."""
