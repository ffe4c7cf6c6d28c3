"""Fixtures of the tests of this folder."""

from tests.ranks import ranks

__all__ = ["ranks"]
