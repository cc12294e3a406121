"""The ``vf-train`` command. Each module parses, calls the library or prints; nothing here is needed to use the library.

train (options) -> sources (files and flags) -> settings (one checked ``TrainSettings``) -> plan (a run that can start)
-> session (show, dump or train it), with display (progress), interrupt (Ctrl-C), canonical (TOML out) and report (the
exit code) beside it.
"""
