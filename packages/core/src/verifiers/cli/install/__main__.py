"""``python -m verifiers.cli.install``: the command ``vf-install``."""

from verifiers.cli.install.command import main

main()
