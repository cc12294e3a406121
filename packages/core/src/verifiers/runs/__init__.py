"""MANY rollouts: plan, run, resume, store; in this process or in workers."""
