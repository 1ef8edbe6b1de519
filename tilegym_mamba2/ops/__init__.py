"""One package per op: its signature and formula in `__init__.py`, one file per backend beside it."""
