"""One module per backend: whether it can run here, and how it launches. No mathematics of Mamba.

Every module here whose name does not begin with an underscore registers a backend when imported, and imports
nothing optional to do so; packages hold what a backend imports when it runs.
"""
