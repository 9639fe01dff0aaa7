"""The stored format of arrays: dtypes, chunks, digests, OCDBT, data files."""
