"""``vf-tui``: saved runs in a terminal: the list of runs, the rollouts of one, one rollout's conversation.

The answers are those of ``vf-view`` (``view.library``), so both show the same numbers. All text of models is shown with
control characters spelled out: nothing in a rollout can move the cursor or restyle the terminal. Needs the extra
``tui``; nothing else of the project imports this package.
"""
