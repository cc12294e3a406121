"""What runs inside a sandbox, as the package ``guest``. Standard library only: verifiers cannot be imported there."""
