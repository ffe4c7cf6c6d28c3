"""Connections between workers.

`local` connects workers on one host, `auth` authenticates these connections, `remote` connects
workers on different hosts over ZeroMQ, and `server` receives requests.
"""
