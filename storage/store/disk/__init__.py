"""A local disk: names it holds, locks left behind, bytes past its page cache."""
