"""Schedules groups, collects their rollouts, and builds one batch per optimizer step."""
