"""A training run without its gradient: inputs, engine, checkpoints, evaluation, metrics, plots."""
