"""Older modules, utility functions and call forms, for packages written for older versions.

The tables in ``compat`` lead here: from older modules (``verifiers.utils.…``), from older methods of rubrics and
environments, and from older call forms. Each function is a few lines on top of the present API. New code needs none of
them.
"""
