"""Word problems about fractions, percentages, ratios, averages and ages."""

from __future__ import annotations

from vf_gsm8k.problem import Draw, Problem, story, whole

ORDINALS = {
    2: "half",
    3: "a third",
    4: "a quarter",
    5: "a fifth",
    6: "a sixth",
    8: "an eighth",
    10: "a tenth",
}


@story
def fraction_of_the_rest(d: Draw) -> Problem | None:
    total, first, second = d.number(24, 480, 4), d.number(2, 6), d.number(2, 6)
    who, thing, friend = d.person(), d.word("stickers|marbles|cards|shells|stamps"), d.person()
    given_away = whole(total, first)
    if given_away is None or (lost := whole(total - given_away, second)) is None:
        return None
    remaining = total - given_away
    return Problem(
        f"{who} has {total} {thing}, gives {ORDINALS[first]} of them to {friend} and then loses"
        f" {ORDINALS[second]} of the rest. How many {thing} does {who} have left?",
        remaining - lost,
        (
            f"{total} / {first} = {given_away} are given away.",
            f"{total} - {given_away} = {remaining} are left.",
            f"{remaining} / {second} = {lost} are lost.",
            f"{remaining} - {lost} = {remaining - lost}",
        ),
    )


@story
def percent_of_a_group(d: Draw) -> Problem | None:
    total, percent, more = d.number(40, 900, 10), d.number(10, 70, 5), d.number(2, 30)
    group_name, first = d.word("school|club|camp|village"), whole(total * percent, 100)
    if first is None or (by_foot_or_car := total - first - (first + more)) <= 0:
        return None
    return Problem(
        f"Of the {total} people in a {group_name}, {percent}% come on foot. By bicycle come {more} more"
        " than on foot, and all the others come by bus. How many come by bus?",
        by_foot_or_car,
        (
            f"On foot: {percent}% of {total} is {first}.",
            f"By bicycle: {first} + {more} = {first + more}.",
            f"{total} - {first} - {first + more} = {by_foot_or_car}",
        ),
    )


@story
def ratio(d: Draw) -> Problem | None:
    red, blue, total, used = d.number(2, 9), d.number(2, 9), d.number(30, 600), d.number(2, 12)
    thing, part = d.word("beads|tiles|balloons|buttons"), whole(total, red + blue)
    if red == blue or part is None or red * part <= used:
        return None
    return Problem(
        f"A box holds {total} {thing}, red and blue ones in the ratio {red} to {blue}. {used} of"
        f" the red {thing} are used. How many red {thing} are left?",
        red * part - used,
        (
            f"{red} + {blue} = {red + blue} parts.",
            f"{total} / {red + blue} = {part} {thing} in a part.",
            f"{red} * {part} = {red * part} red {thing}.",
            f"{red * part} - {used} = {red * part - used}",
        ),
    )


@story
def ages(d: Draw) -> Problem | None:
    now, times, years = d.number(3, 25), d.number(2, 4), d.number(2, 20)
    child, parent = d.person(), d.person()
    if (older := times * now) > 80 or older - now < 18:
        return None
    return Problem(
        f"{child} is {now} years old, and {parent} is {times} times as old. How old are the two"
        f" together in {years} years?",
        older + now + 2 * years,
        (
            f"{parent} is {times} * {now} = {older} years old.",
            f"In {years} years they are {now + years} and {older + years}.",
            f"{now + years} + {older + years} = {older + now + 2 * years}",
        ),
    )


@story
def missing_score(d: Draw) -> Problem | None:
    first = d.number(50, 99)
    second = d.number(50, 99)
    third = d.number(50, 99)
    mean = d.number(60, 95)
    who, subject = d.person(), d.word("history|biology|spelling|geography")
    so_far, needed = first + second + third, 4 * mean - (first + second + third)
    if not 40 <= needed <= 100:
        return None
    return Problem(
        f"In three {subject} tests {who} scored {first}, {second} and {third} points. How many"
        f" points does {who} need in the fourth test for an average of exactly {mean} points?",
        needed,
        (
            f"Four tests with an average of {mean} have 4 * {mean} = {4 * mean} points.",
            f"{first} + {second} + {third} = {so_far} points are there.",
            f"{4 * mean} - {so_far} = {needed}",
        ),
    )


@story
def recipe(d: Draw) -> Problem | None:
    serves = d.number(2, 8)
    guests = d.number(6, 60, 2)
    grams = d.number(100, 800, 20)
    has = d.number(50, 900, 50)
    what, needed = d.word("flour|rice|lentils|sugar"), whole(grams * guests, serves)
    if needed is None or needed <= has or guests <= serves:
        return None
    return Problem(
        f"A recipe for {serves} people needs {grams} grams of {what}. {guests} people are coming,"
        f" and there are {has} grams of {what} in the kitchen. How many grams must be bought?",
        needed - has,
        (
            f"For {guests} people: {grams} * {guests} / {serves} = {needed} grams.",
            f"{needed} - {has} = {needed - has}",
        ),
    )


@story
def backwards(d: Draw) -> Problem:
    final, times, added = d.number(3, 40), d.number(2, 6), d.number(3, 40)
    who, thing = d.person(), d.word("apples|coins|pencils|books|tomatoes")
    before = final + added
    return Problem(
        f"{who} had some {thing}. First their number became {times} times as large, then {added}"
        f" {thing} were given away, and {times * before - added} were left. With how many {thing}"
        f" did {who} begin?",
        before,
        (
            f"Before giving away there were {times * before - added} + {added} = {times * before}.",
            f"{times * before} / {times} = {before}",
        ),
    )


@story
def growing(d: Draw) -> Problem:
    start, factor, times, lost = d.number(2, 20), d.number(2, 3), d.number(3, 6), d.number(2, 15)
    what = d.word("bacteria|water lilies|snails|yeast cells")
    grown = start * factor**times
    verb = "doubles" if factor == 2 else "triples"
    chain = " * ".join([str(start), *[str(factor)] * times])
    return Problem(
        f"The number of {what} in a pond {verb} every day. On Monday morning there are {start}. How"
        f" many are there {times} days later, after {lost} have been taken out on that last day?",
        grown - lost,
        (f"{chain} = {grown}", f"{grown} - {lost} = {grown - lost}"),
    )


@story
def votes(d: Draw) -> Problem | None:
    total, lead, empty = d.number(60, 900), d.number(4, 120), d.number(2, 30)
    winner, loser = d.person(), d.person()
    votes_of_loser = whole(total - empty - lead, 2)
    if votes_of_loser is None or votes_of_loser < 10:
        return None
    return Problem(
        f"{total} votes are cast in an election between {winner} and {loser}; {empty} of them are"
        f" not valid. {winner} gets {lead} votes more than {loser}. How many votes does {winner}"
        " get?",
        votes_of_loser + lead,
        (
            f"{total} - {empty} = {total - empty} valid votes.",
            f"({total - empty} - {lead}) / 2 = {votes_of_loser} votes for {loser}.",
            f"{votes_of_loser} + {lead} = {votes_of_loser + lead}",
        ),
    )
