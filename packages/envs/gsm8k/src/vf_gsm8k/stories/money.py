"""Word problems about buying, selling, saving and earning."""

from __future__ import annotations

from vf_gsm8k.problem import Draw, Problem, story, whole


@story
def change(d: Draw) -> Problem | None:
    count, price, paid = d.number(2, 12), d.number(2, 15), d.number(20, 100, 10)
    who = d.person()
    thing = d.word("notebooks|puzzles|plants|kites|scarves|lamps")
    cost = count * price
    if not 0 < paid - cost < 60:
        return None
    return Problem(
        f"{who} buys {count} {thing} that cost ${price} each and pays with ${paid}. How many"
        f" dollars of change does {who} get?",
        paid - cost,
        (
            f"{count} * {price} = {cost} dollars for the {thing}.",
            f"{paid} - {cost} = {paid - cost}",
        ),
    )


@story
def two_kinds_of_tickets(d: Draw) -> Problem:
    adults, children = d.number(2, 30), d.number(2, 40)
    adult_price, child_price = d.number(8, 20), d.number(3, 7)
    venue = d.word("museum|zoo|aquarium|castle|theatre|planetarium")
    full, reduced = adults * adult_price, children * child_price
    return Problem(
        f"A ticket for the {venue} costs ${adult_price} for an adult and ${child_price} for a"
        f" child. One morning {adults} adults and {children} children come. How many dollars does"
        f" the {venue} take in?",
        full + reduced,
        (
            f"Adults: {adults} * {adult_price} = {full} dollars.",
            f"Children: {children} * {child_price} = {reduced} dollars.",
            f"{full} + {reduced} = {full + reduced}",
        ),
    )


@story
def bake_sale_profit(d: Draw) -> Problem | None:
    batches = d.number(3, 12)
    per_batch = d.number(8, 24, 4)
    price = d.number(2, 5)
    spent = d.number(10, 90)
    who, cake = d.person(), d.word("muffins|cookies|scones|brownies|pretzels")
    made, earned = batches * per_batch, batches * per_batch * price
    if earned <= spent:
        return None
    return Problem(
        f"For a bake sale {who} makes {batches} batches of {per_batch} {cake} and sells every one"
        f" for ${price}. The ingredients cost ${spent} in all. What is the profit in dollars?",
        earned - spent,
        (
            f"{batches} * {per_batch} = {made} {cake}.",
            f"{made} * {price} = {earned} dollars taken in.",
            f"{earned} - {spent} = {earned - spent}",
        ),
    )


@story
def saving_up(d: Draw) -> Problem | None:
    price = d.number(90, 600, 10)
    has = d.number(10, 80)
    earns = d.number(12, 40)
    spends = d.number(2, 9)
    who, thing, kept = d.person(), d.word("bicycle|guitar|tent|camera|telescope"), earns - spends
    weeks = whole(price - has, kept)
    if weeks is None or weeks < 3:
        return None
    return Problem(
        f"{who} wants a {thing} for ${price} and has ${has} already. Each week {who} earns ${earns}"
        f" and spends ${spends} of it. After how many weeks is there enough money for the {thing}?",
        weeks,
        (
            f"{price} - {has} = {price - has} dollars are missing.",
            f"{earns} - {spends} = {kept} dollars are saved each week.",
            f"{price - has} / {kept} = {weeks}",
        ),
    )


@story
def discount(d: Draw) -> Problem | None:
    price, percent, coupon = d.number(20, 400, 5), d.number(10, 60, 5), d.number(2, 15)
    who = d.person()
    thing = d.word("jacket|desk|carpet|radio|suitcase")
    off = whole(price * percent, 100)
    if off is None or price - off <= coupon:
        return None
    reduced = price - off
    return Problem(
        f"A {thing} costs ${price}. It is sold at {percent}% off, and {who} has a coupon that takes"
        f" another ${coupon} off the reduced price. How many dollars does {who} pay?",
        reduced - coupon,
        (
            f"{percent}% of {price} is {off} dollars.",
            f"{price} - {off} = {reduced} dollars after the discount.",
            f"{reduced} - {coupon} = {reduced - coupon}",
        ),
    )


@story
def overtime(d: Draw) -> Problem:
    wage, days, hours, extra = d.number(9, 30), d.number(3, 6), d.number(4, 8), d.number(2, 9)
    who, normal = d.person(), days * hours
    pay, more = normal * wage, extra * 2 * wage
    return Problem(
        f"{who} earns ${wage} an hour and twice as much for each hour of overtime. In one week"
        f" {who} worked {days} days of {hours} hours and {extra} hours of overtime on top. How many"
        f" dollars did {who} earn that week?",
        pay + more,
        (
            f"{days} * {hours} = {normal} normal hours.",
            f"{normal} * {wage} = {pay} dollars.",
            (
                f"Overtime pays 2 * {wage} = {2 * wage} dollars an hour: {extra} * {2 * wage} ="
                f" {more} dollars."
            ),
            f"{pay} + {more} = {pay + more}",
        ),
    )


@story
def shared_bill(d: Draw) -> Problem | None:
    friends, meals, drinks, tip = d.number(2, 8), d.number(8, 24), d.number(2, 6), d.number(5, 30)
    bill = friends * (meals + drinks)
    share = whole(bill + tip, friends)
    if share is None:
        return None
    return Problem(
        f"{friends} friends eat out. Each of them orders a meal for ${meals} and a drink for"
        f" ${drinks}. They add a tip of ${tip} for the whole table and split everything equally."
        " How many dollars does each friend pay?",
        share,
        (
            f"{meals} + {drinks} = {meals + drinks} dollars per friend.",
            f"{friends} * {meals + drinks} = {bill} dollars for the table.",
            f"{bill} + {tip} = {bill + tip} dollars with the tip.",
            f"{bill + tip} / {friends} = {share}",
        ),
    )


@story
def coins(d: Draw) -> Problem:
    quarters, dimes, nickels = d.number(3, 40), d.number(2, 50), d.number(2, 50)
    who, total = d.person(), 25 * quarters + 10 * dimes + 5 * nickels
    return Problem(
        f"In a jar {who} finds {quarters} quarters, {dimes} dimes and {nickels} nickels. How many"
        " cents are in the jar?",
        total,
        (
            f"Quarters: {quarters} * 25 = {25 * quarters} cents.",
            f"Dimes: {dimes} * 10 = {10 * dimes} cents.",
            f"Nickels: {nickels} * 5 = {5 * nickels} cents.",
            f"{25 * quarters} + {10 * dimes} + {5 * nickels} = {total}",
        ),
    )


@story
def cheaper_by_the_box(d: Draw) -> Problem | None:
    boxes = d.number(2, 9)
    per_box = d.number(6, 24, 2)
    single = d.number(2, 6)
    box_price = d.number(10, 100)
    who, thing = d.person(), d.word("bulbs|markers|batteries|candles")
    count = boxes * per_box
    saved = count * single - boxes * box_price
    if saved <= 0 or per_box * single - box_price > per_box * single / 2:
        return None
    return Problem(
        f"A single one of the {thing} costs ${single}, and a box of {per_box} costs ${box_price}."
        f" {who} needs {count} {thing} and buys boxes. How many dollars does {who} save compared"
        " with buying them one by one?",
        saved,
        (
            f"{count} / {per_box} = {boxes} boxes.",
            f"{boxes} * {box_price} = {boxes * box_price} dollars for the boxes.",
            f"{count} * {single} = {count * single} dollars one by one.",
            f"{count * single} - {boxes * box_price} = {saved}",
        ),
    )
