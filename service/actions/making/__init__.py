"""Making what others go on in: runs before their jobs, roots while servers run."""
