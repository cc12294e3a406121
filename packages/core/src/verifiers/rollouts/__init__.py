"""ONE rollout: its state, its turns, its stop conditions, how author code is called,
and the loop."""
