"""Keeps rollouts coming: schedules groups, collects them, and makes one batch per optimizer step."""
