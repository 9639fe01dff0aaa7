"""The one decoder, in NNX and in Linen: every family is a set of its options."""
