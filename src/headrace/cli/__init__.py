"""The command line: one module a command, loaded only when that command runs.

Nothing here computes; a command parses its flags, calls one room below and presents the result.
"""
