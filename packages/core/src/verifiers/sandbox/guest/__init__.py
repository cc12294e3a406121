"""Code run inside a sandbox, as the package ``guest``. Standard library only: verifiers is not
installed there."""
