"""Stepwell trains language models through their whole life."""

__version__ = "0.1.0"
