"""The host side of a sandbox: sessions, their processes, and the connection to the worker."""
