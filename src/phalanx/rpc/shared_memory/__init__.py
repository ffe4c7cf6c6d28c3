"""Tensors in memory that workers of one host share.

`layout` describes the blocks and their leases, `sender` leases blocks to receivers, and `receiver`
maps them.
"""
