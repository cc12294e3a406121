"""The commands. Each parses, calls the library, prints; the library needs nothing of this."""
