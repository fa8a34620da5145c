"""What one chapter says: its numbers, verdicts and sentences, each computed from measured rows.

A chapter is a folder here; what serves every chapter is in the folder above.
"""
