"""``vf-view``: a local web page of saved evaluations and training runs, finished or running.

Reads durable files, and writes a single file: ``labels.jsonl`` beside an evaluation that a person
labels. ``catalog`` finds the runs below the given folders; ``index`` reads a file of saved rollouts
once, incrementally, and keeps the columns for sorting and filtering; ``library`` answers the page's
requests; ``app`` and ``guard`` serve them to this machine; ``export`` writes the same page as
files.

Model output is never interpreted: the page builds text nodes only, under a content security policy
that allows no scripts except the page's files.
"""
