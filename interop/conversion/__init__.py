"""Rules between our leaves and another format's tensors, for both directions."""
