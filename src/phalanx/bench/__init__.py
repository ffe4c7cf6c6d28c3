"""Measurements: how fast is this machine, side by side with the rivals.

`collectives` times operations on several backends in one run, interleaved; `step` times the
training step of a small network; `table` shows and stores the figures with machine and versions.
"""
