"""Older modules, utility functions and call forms, for packages written for older versions.

The tables in ``compat`` map older modules (``verifiers.utils.…``), methods of rubrics and
environments, and call forms to this package. Each function is a thin wrapper of the current API.
New code does not need them.
"""
