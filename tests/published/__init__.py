"""PyTorch's published RPC examples, with their imports changed: `make rpc-examples EXAMPLES=path`.

`cases` says which there are and what is stood in for, `imports` changes the imports in a copy,
`running` runs an example, `comparing` tells one run from the other. `stand_in` is for the processes
of an example.
"""
