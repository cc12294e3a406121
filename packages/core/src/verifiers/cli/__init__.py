"""The commands. Each parses, calls the library, prints; nothing here is needed to use
the library."""
