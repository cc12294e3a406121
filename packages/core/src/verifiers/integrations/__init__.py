"""Other tools, without torch: Inspect's logs and tasks (``inspect``), trajectories as JSON lines (``trajectories``),
OpenEnv's clients (``openenv``).

Importing a module here never imports its peer. Adapters for trainers are in ``verifiers_trainer.integrations``.
"""
