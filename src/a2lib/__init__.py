"""Building blocks and measurements for training Transformers on several GPUs.

Importing this package alone imports no torch: the report and the book read measured data on any
machine. Import the part you need, `a2lib.attention` or `a2lib.lab` for instance.
"""

__version__ = "0.1.0"
