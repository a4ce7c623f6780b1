"""The laws: what must hold whatever the code looks like.

A test of this ring states something about texts, numbers, files or answers that a user could
check without reading the package: the exact law of every sampler in worlds that can be counted,
the authors' numbers, independence of batch and neighbors, resuming, one text for one seed over
Python, command line and HTTP, and that what was written before can still be read.

Tests here use public names of `adlm`, the command line and HTTP. What the mathematics needs
beyond them stands in `adapter.py`, the only file of the ring that knows the package's modules: a
redesign changes the inside of its functions, and no test. `world.py` writes the laws down a
second time, naively. `fixtures/` was written by an earlier version with `make_fixtures.py` and is
never written again. `faults.py` plants faults in a copy of the tree and shows that the ring
notices each of them (`python -m tests.laws.faults`).
"""
