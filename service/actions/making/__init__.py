"""Making what others go on in: runs before their jobs, and after them; roots while servers run."""
