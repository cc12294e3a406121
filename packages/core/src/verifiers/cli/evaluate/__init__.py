"""``vf-eval``: from the command line and TOML files to runs, their display and their summary."""
