"""The host's side of a sandbox: sessions, their processes, and the connection to them."""
