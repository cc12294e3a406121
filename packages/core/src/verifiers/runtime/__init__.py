"""Execution helpers without domain knowledge: sync and async calls, deadlines, threads, processes, JSON, logging."""
