"""The comparison: workloads by name, implementations of the whole forward, how they are timed, and reports.

The commands `tilegym-mamba2 bench` and `tilegym-mamba2 report` and the modules in bench/ of the repository share it.
"""
