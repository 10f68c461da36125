"""Tokens of a data set: made once, cached in a folder with checksums, read on demand."""
