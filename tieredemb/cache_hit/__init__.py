"""The cache-hit benchmark: which share of a trace's lookups a hot cache of a given size and policy serves.

It drives the real plan and policy code over key traces, without moving a weight, and sets the result beside
two references that know the future: the best static set and Belady's optimum. `python -m tieredemb cache-hit
--help`.
"""
