"""Task folders in Harbor's format: reading them, their sandboxes, grading, and the environment
``HarborEnv``."""
