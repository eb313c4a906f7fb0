"""The ``ecotone`` command."""

from ecotone.cli.app import main

__all__ = ["main"]
