"""The sandbox backends of this package, one module each."""
