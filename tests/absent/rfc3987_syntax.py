"""Absent for what tests start: jsonschema, which reads notebooks, imports it where it is there, and
it then builds a grammar of IRIs for seconds. No notebook has one."""

raise ImportError
