"""The pages on parallelism. They measure nothing: what they say is computed by a2lib.theory when
the page is built.

``schemes`` and ``clocks`` draw who holds what and what moves when; ``layer`` is about one layer on
N devices, ``accounting`` about the model of 220 billion parameters, ``axes`` about pipelines,
experts and contexts.
"""
