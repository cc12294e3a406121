"""The ``vf-train`` command. Each module parses, calls the library or prints; the library needs none of them.

train (options) -> sources (files and flags, by the reader of ``verifiers.cli.common``) -> settings (one checked
``TrainSettings``, and back to TOML) -> plan (a run that can start) -> session (show, dump or train it), with display
(progress), launch (a server beside the trainer) and report (the exit code) beside it.
"""
