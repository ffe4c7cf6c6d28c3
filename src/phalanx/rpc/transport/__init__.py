"""Connections between workers.

`local` connects workers on one host, `auth` authenticates these connections, and `remote` connects
workers on different hosts over ZeroMQ.
"""
