#!/bin/bash
set -euo pipefail
cd /app
cat > roman.py <<'END'
import sys

VALUES = [
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
]


def roman(number):
    text = ""
    for value, letters in VALUES:
        text += letters * (number // value)
        number %= value
    return text


for line in sys.stdin:
    word = line.strip()
    number = int(word) if word.isdecimal() and word.isascii() else 0
    print(roman(number) if 1 <= number <= 3999 else "?")
END
