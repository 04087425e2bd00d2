"""Ground floor: errors, clock, ids, environment, logging.

Imports nothing from the rest of the package and no third-party library.
"""
