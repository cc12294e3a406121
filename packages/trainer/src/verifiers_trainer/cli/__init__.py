"""The ``vf-train`` command. Its modules parse, call the library or print; no other package imports
them.

train (options) -> sources (files and flags, by the reader of ``verifiers.cli.common``) -> settings
(one checked ``TrainSettings``, and back to TOML) -> plan (a run that can start) -> session (show,
dump or train). session uses display (progress), launch (a server beside the trainer) and report
(the exit code).
"""
