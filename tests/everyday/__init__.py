"""Everyday load, seen from outside: a real `conveyor up` under the mix of jobs that people have.

Dozens of jobs at once, of one task to ten thousand and mostly small, fetch from slow and fast hosts or call functions;
several clients submit, watch, pause, change, cancel, rerun and export them over HTTP. The site that is fetched from
keeps a ledger of requests of its own, and everything that the server says is held to it.
"""
