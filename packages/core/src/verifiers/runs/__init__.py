"""Run many rollouts: plan, generate, score, store and resume, in this process or in workers."""
