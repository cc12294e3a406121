"""Durable storage of a run: acknowledged means on disk."""
