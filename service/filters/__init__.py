"""Language of `filter` and `order_by`, the query parameters of lists. Pure."""
