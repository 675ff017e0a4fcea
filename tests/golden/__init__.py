"""Golden bits: programs of user calls, whose results are kept as hashes: a rebuilt middle is seen to change none.

`python -m tests.golden show 17` prints a program, `run 17` runs it alone, `record FILE` and `compare FILE` run all of
them. The CPU's hashes are `cpu.json`; what was meant to change them is listed in `CHANGES.md`.
"""
