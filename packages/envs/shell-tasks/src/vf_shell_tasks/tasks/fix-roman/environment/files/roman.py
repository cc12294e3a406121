import sys

VALUES = [(1000, "M"), (500, "D"), (400, "CD"), (100, "C"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (1, "I")]


def roman(number):
    text = ""
    for value, letters in VALUES:
        if number >= value:
            text += letters
            number -= value
    return text


for line in sys.stdin:
    print(roman(int(line)))
