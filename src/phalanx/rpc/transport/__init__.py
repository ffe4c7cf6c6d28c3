"""Connections between workers: `local` on one host, `remote` over ZeroMQ between hosts."""
