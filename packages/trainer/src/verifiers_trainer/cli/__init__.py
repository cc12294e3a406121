"""The ``vf-train`` command. Each module parses, calls the library or prints; nothing here is needed to use the library.

    sources    files and flags -> assignments, each with its place
    settings   assignments -> one checked ``TrainSettings``
    train      the command: prepare, train or resume, report
    display    live progress and the closing table
    interrupt  Ctrl-C
"""
