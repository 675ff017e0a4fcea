"""Benchmarks: `python -m benchmarks` times everything, keeps the results and rewrites the README's tables."""
