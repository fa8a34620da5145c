"""Fully sharded data parallel: ``shards`` (one parameter), ``division`` (which are divided),
``units`` (what travels together), ``schedule`` (when), ``wrapper`` (what a user calls),
``state_dicts`` and ``checkpoint`` (what is kept of it), ``clipping`` (a norm to refuse)."""

from a2lib.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
