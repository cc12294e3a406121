"""``vf-tui``: browse saved runs in a terminal: the list of runs, the rollouts of a run, one
rollout's conversation.

Uses ``view.library``, as ``vf-view`` does, so both show the same numbers. Control characters in
model text are escaped, so that a rollout cannot move the cursor or restyle the terminal. Needs the
extra ``tui``; no other package imports this package.
"""
