"""What every command shares: its frame, its streams, its interrupts, its completion, and the files it writes."""
