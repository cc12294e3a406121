"""Domain-independent execution helpers: sync and async calls, deadlines, threads, processes, JSON,
logging."""
