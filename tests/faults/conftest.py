"""Fixtures of the tests of promises."""

from support.eval_command import eval_folder, vf_eval  # noqa: F401 - fixtures are found by name
