"""Word problems about counting, packing, measuring and comparing."""

from __future__ import annotations

from vf_gsm8k.problem import Draw, Problem, story, whole


@story
def packing(d: Draw) -> Problem:
    crates = d.number(3, 15)
    per_crate = d.number(12, 60, 3)
    bad = d.number(2, 20)
    per_bag = d.number(4, 12)
    fruit, good = d.word("oranges|lemons|peaches|onions|potatoes"), crates * per_crate - bad
    return Problem(
        f"A shop gets {crates} crates with {per_crate} {fruit} each. {bad} {fruit} are bad and"
        f" thrown away; the others are put into bags of {per_bag}. How many full bags are there?",
        good // per_bag,
        (
            f"{crates} * {per_crate} = {crates * per_crate} {fruit}.",
            f"{crates * per_crate} - {bad} = {good} good ones.",
            (
                f"{good} = {good // per_bag} * {per_bag} + {good % per_bag}, so the number of full"
                f" bags is {good // per_bag}"
            ),
        ),
    )


@story
def buses(d: Draw) -> Problem | None:
    classes = d.number(2, 12)
    pupils = d.number(15, 30)
    adults = d.number(2, 15)
    seats = d.number(20, 55, 5)
    people = classes * pupils + adults
    needed = -(-people // seats)
    if needed < 2 or people % seats == 0:
        return None
    return Problem(
        f"{classes} classes of {pupils} pupils and {adults} adults go on a trip in buses of {seats}"
        " seats. How many buses do they need at least?",
        needed,
        (
            f"{classes} * {pupils} = {classes * pupils} pupils.",
            f"{classes * pupils} + {adults} = {people} people.",
            (
                f"{people} / {seats} is more than {needed - 1} and less than {needed}, so they need"
                f" {needed}"
            ),
        ),
    )


@story
def fence(d: Draw) -> Problem | None:
    length = d.number(10, 60, 2)
    width = d.number(6, 40, 2)
    gap = d.number(2, 4)
    price = d.number(3, 12)
    around, what = 2 * (length + width), d.word("garden|field|meadow|yard")
    posts = whole(around, gap)
    if posts is None or length <= width or length % gap or width % gap:
        return None
    return Problem(
        f"Around a rectangular {what}, {length} metres long and {width} metres wide, posts are set"
        f" every {gap} metres, one in each corner. A post costs ${price}. How many dollars do all"
        " the posts cost?",
        posts * price,
        (
            f"2 * ({length} + {width}) = {around} metres around.",
            f"{around} / {gap} = {posts} posts.",
            f"{posts} * {price} = {posts * price}",
        ),
    )


@story
def path_around_a_pool(d: Draw) -> Problem:
    length, width, border = d.number(8, 40), d.number(4, 25), d.number(1, 4)
    outer, inner = (length + 2 * border) * (width + 2 * border), length * width
    metres = "metre" if border == 1 else "metres"
    return Problem(
        f"A rectangular pool is {length} metres long and {width} metres wide. A path {border}"
        f" {metres} wide runs all the way around it. How many square metres does the path cover?",
        outer - inner,
        (
            f"With the path: {length + 2 * border} * {width + 2 * border} = {outer} square metres.",
            f"The pool: {length} * {width} = {inner} square metres.",
            f"{outer} - {inner} = {outer - inner}",
        ),
    )


@story
def chain_of_comparisons(d: Draw) -> Problem | None:
    first, times, fewer = d.number(4, 40), d.number(2, 6), d.number(2, 30)
    first_person, two, three = d.person(), d.person(), d.person()
    thing, second = d.word("medals|fish|postcards|baskets|goals"), first * times
    if (third := second - fewer) < 2:
        return None
    return Problem(
        f"{first_person} has {first} {thing}. {two} has {times} times as many as {first_person}, and {three} has"
        f" {fewer} fewer than {two}. How many {thing} do the three have together?",
        first + second + third,
        (
            f"{two}: {times} * {first} = {second}.",
            f"{three}: {second} - {fewer} = {third}.",
            f"{first} + {second} + {third} = {first + second + third}",
        ),
    )


@story
def legs(d: Draw) -> Problem | None:
    animals, chickens = d.number(8, 90), d.number(3, 60)
    if (cows := animals - chickens) < 2:
        return None
    count = 2 * chickens + 4 * cows
    four = d.word("cows|sheep|goats|pigs")
    return Problem(
        f"On a farm there are only chickens and {four}, {animals} animals with {count} legs"
        f" together. How many {four} are there?",
        cows,
        (
            f"If all were chickens there would be 2 * {animals} = {2 * animals} legs.",
            (
                f"{count} - {2 * animals} = {count - 2 * animals} legs are over, 2 for each of the"
                f" {four}."
            ),
            f"{count - 2 * animals} / 2 = {cows}",
        ),
    )


@story
def theatre_rows(d: Draw) -> Problem:
    front, more, rows, empty = d.number(8, 30), d.number(2, 4), d.number(4, 12), d.number(3, 40)
    last = front + more * (rows - 1)
    seats = rows * (front + last) // 2
    return Problem(
        f"The first row of a theatre has {front} seats, and each further row has {more} more than"
        f" the one before. There are {rows} rows, and {empty} seats are empty. How many seats are"
        " taken?",
        seats - empty,
        (
            f"The last row has {front} + {rows - 1} * {more} = {last} seats.",
            f"All rows: {rows} * ({front} + {last}) / 2 = {seats} seats.",
            f"{seats} - {empty} = {seats - empty}",
        ),
    )


@story
def cutting_a_rope(d: Draw) -> Problem | None:
    metres, piece, used = d.number(3, 40), d.number(15, 80, 5), d.number(40, 400, 20)
    who, remaining = d.person(), 100 * metres - used
    if remaining < 2 * piece or remaining % piece == 0:
        return None
    return Problem(
        f"{who} has a rope of {metres} metres, cuts off {used} centimetres and cuts the rest into"
        f" pieces of {piece} centimetres. How many centimetres of rope are left over at the end?",
        remaining % piece,
        (
            f"{metres} metres are {100 * metres} centimetres.",
            f"{100 * metres} - {used} = {remaining} centimetres.",
            (
                f"{remaining} = {remaining // piece} * {piece} + {remaining % piece}, so what is left over is"
                f" {remaining % piece}"
            ),
        ),
    )


@story
def stock(d: Draw) -> Problem | None:
    start = d.number(80, 500, 5)
    sold = d.number(6, 40)
    days = d.number(2, 9)
    arrived = d.number(20, 200, 10)
    thing = d.word("loaves|newspapers|bottles of milk|bunches of roses")
    if (remaining := start - sold * days) <= 0:
        return None
    return Problem(
        f"A shop has {start} {thing}. It sells {sold} a day for {days} days; then {arrived} more"
        " arrive. How many are there now?",
        remaining + arrived,
        (
            f"{sold} * {days} = {sold * days} are sold.",
            f"{start} - {sold * days} = {remaining} are left.",
            f"{remaining} + {arrived} = {remaining + arrived}",
        ),
    )


@story
def choosing_clothes(d: Draw) -> Problem:
    shirts, trousers, hats, torn = d.number(3, 12), d.number(2, 9), d.number(2, 7), d.number(1, 2)
    who, shirts_left = d.person(), shirts - torn
    shirts_torn = "One shirt is" if torn == 1 else "Two shirts are"
    return Problem(
        f"{who} owns {shirts} shirts, {trousers} pairs of trousers and {hats} hats, all different."
        f" {shirts_torn} torn and cannot be worn. In how many ways can one shirt, one pair of"
        " trousers and one hat be put on?",
        shirts_left * trousers * hats,
        (
            f"{shirts} - {torn} = {shirts_left} shirts can be worn.",
            f"{shirts_left} * {trousers} = {shirts_left * trousers} ways for shirt and trousers.",
            f"{shirts_left * trousers} * {hats} = {shirts_left * trousers * hats}",
        ),
    )
