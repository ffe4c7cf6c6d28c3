"""What checks an installation or a user's own program.

`selfcheck` is behind `phalanx test`: every operation that exists, against an oracle, on two ranks.
"""
