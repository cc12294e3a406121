"""Control characters in text of others are spelled out, and what is printed can
always be encoded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.runtime.terminal import escape_control


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb", "a\\x0db"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("tab\tline\nend é 漢 🙂", "tab\tline\nend é 漢 🙂"),
    ],
)
def test_control_characters_are_spelled_out(raw, shown):
    assert escape_control(raw) == shown


@given(st.text(alphabet=st.characters(codec=None)))
def test_escaped_text_can_always_be_printed(text):
    shown = escape_control(text)
    shown.encode("utf-8")
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
