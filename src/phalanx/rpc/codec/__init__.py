"""Encoding and decoding of messages: wire format, tensor descriptors and pickling.

`message` is the format of a message and of its tensor descriptors. `pickling` serializes objects,
whose tensors pass through a hook. `phalanx.rpc.message_codec` joins them.
"""
