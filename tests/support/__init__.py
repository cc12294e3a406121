"""Pieces the tests share: real servers on loopback, real child processes, small
models. No mocks."""
