"""Benchmarks: `python -m benchmarks` times everything, keeps the results and rewrites the tables of README and docs."""
