"""Closed forms that need neither torch nor a GPU."""
