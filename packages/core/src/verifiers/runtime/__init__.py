"""What Python leaves to us: sync and async calls, deadlines, threads, processes, JSON, logging. Knows no domain."""
