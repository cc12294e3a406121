"""The default prompt of judges of versions 0.1, which packages import to build theirs from it or to
compare texts."""

_FENCE = "```"
DEFAULT_JUDGE_PROMPT = f"""\
Given a ground truth answer and a response, determine if the response is correct.

Question:
{_FENCE}
{{question}}
{_FENCE}

Ground truth answer:
{_FENCE}
{{answer}}
{_FENCE}

Response:
{_FENCE}
{{response}}
{_FENCE}

Respond either "yes" or "no" only."""
