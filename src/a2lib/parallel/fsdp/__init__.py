"""Fully sharded data parallel: ``shards`` (one parameter), ``division`` (which are divided),
``units`` (what travels together), ``transfers`` (how), ``schedule`` (when), ``wrapper`` (what a
user calls), ``checkpoint`` (what is kept of it), ``refusals`` (what is not to be had of it)."""

from a2lib.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
