"""The stories: each module registers functions that sample one kind of word problem.

Importing this package fills ``problem.STORIES``.
"""

from __future__ import annotations

from vf_gsm8k.stories import amounts, money, pace, shares

__all__ = ["amounts", "money", "pace", "shares"]
