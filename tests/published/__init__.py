"""PyTorch's published RPC examples, with their imports changed: `make rpc-examples EXAMPLES=path`.

`cases` lists the examples and their substitutes, `imports` changes the imports in a copy, `runner`
runs an example, and `comparison` compares two runs. The processes of an example import
`substitutes`.
"""
