"""Fully sharded data parallel: ``shards`` (one parameter), ``units`` (what travels together),
``wrapper`` (when)."""

from a2lib.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
