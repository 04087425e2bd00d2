"""The engine room: core loop, core process, client, input and output processing, supervision.

The one place where the control plane meets the data plane. Must not import torch; the worker is imported inside the
function that makes it, in the process that runs it.
"""
