"""Parts of ``tools/mutate.py``: mutants from the syntax tree, mutants with a name, and the runs that judge them.

Not part of the package `headrace`; must not change the working tree.
"""
