"""Schedules groups, collects their rollouts, and builds the batches."""
