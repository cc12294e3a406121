"""``python -m verifiers.sandbox.probe [BACKEND]``."""

from verifiers.sandbox.probe import main

main()
