"""``vf-view``: a local web page over saved runs, evaluations and trainings, finished or going on.

It reads what is durable and writes nothing. ``catalog`` finds the runs below the given folders and opens nothing
else; ``index`` reads a file of rows once, in pieces, and keeps what sorting and filtering need; ``library`` answers the
page's questions; ``app`` and ``guard`` serve them to this machine; ``export`` writes the same page as files.

Model output is data here: the page builds text nodes only, under a policy that allows no script but its own files.
"""
