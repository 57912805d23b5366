"""Benchmarks, and what examples share with them. Not part of the package."""
