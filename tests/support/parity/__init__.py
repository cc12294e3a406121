"""Small scripts that run under published releases and under this one, and what they gave there.

``scripts`` has one function per row; it imports only ``verifiers``, ``openai`` and ``datasets``,
which every release has. ``play.py FILE`` runs them all and writes what they returned.
``published.json`` is what the releases wrote: ``{script: {release: value}}``; ``python
tests/support/parity/releases.py --write`` renews it.
"""
