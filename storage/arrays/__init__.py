"""The stored format of arrays: dtypes, chunks, digests, OCDBT, value files. Pure."""
