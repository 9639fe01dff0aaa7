"""HTTP parts that all routes share: problems, preconditions, paging, byte ranges, limits."""
