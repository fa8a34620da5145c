"""Fully sharded data parallel: ``shards`` (one parameter), ``units`` (what travels together),
``wrapper`` (when), ``clipping`` (a norm to refuse), ``checkpoint`` (what is kept of it)."""

from a2lib.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
