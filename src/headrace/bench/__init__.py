"""Benchmarks: latency and throughput of the offline engine, load on any OpenAI server, start-up of our own.

The last line on standard output is one JSON document (`headrace.bench.report`); everything else goes to standard error.
"""
