"""Encoding and decoding of messages: wire format, tensor descriptors and pickling.

`message` is the format of a message and of its tensor descriptors, `pickling` serializes objects,
`autograd_hook` is the hook that tensors pass through, and `message_codec` joins them.
"""
