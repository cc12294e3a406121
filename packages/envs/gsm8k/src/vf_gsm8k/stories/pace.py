"""Word problems about time, speed, work and filling."""

from __future__ import annotations

from vf_gsm8k.problem import Draw, Problem, story, whole


@story
def two_legs_of_a_trip(d: Draw) -> Problem:
    fast = d.number(50, 110, 5)
    slow = d.number(20, 45, 5)
    long = d.number(2, 7)
    short = d.number(2, 6)
    who, vehicle = d.person(), d.word("car|bus|van|truck")
    first, second = fast * long, slow * short
    return Problem(
        f"{who} drives a {vehicle} for {long} hours at {fast} miles per hour, then for {short}"
        f" hours at {slow} miles per hour. How many miles is that in all?",
        first + second,
        (
            f"{long} * {fast} = {first} miles.",
            f"{short} * {slow} = {second} miles.",
            f"{first} + {second} = {first + second}",
        ),
    )


@story
def moving_apart(d: Draw) -> Problem | None:
    speed, second_speed, hours = d.number(8, 60), d.number(8, 60), d.number(2, 9)
    first, second = d.person(), d.person()
    if speed == second_speed:
        return None
    return Problem(
        f"{first} and {second} leave the same town at the same time in opposite directions, {first}"
        f" at {speed} km per hour and {second} at {second_speed} km per hour. How many km apart are they"
        f" after {hours} hours?",
        (speed + second_speed) * hours,
        (
            f"Each hour they get {speed} + {second_speed} = {speed + second_speed} km further apart.",
            f"{speed + second_speed} * {hours} = {(speed + second_speed) * hours}",
        ),
    )


@story
def catching_up(d: Draw) -> Problem | None:
    slow, gain, start = d.number(3, 15), d.number(2, 12), d.number(2, 8)
    first, second, ahead = d.person(), d.person(), slow * start
    hours = whole(ahead, gain)
    if hours is None or hours < 2:
        return None
    return Problem(
        f"{first} sets out at {slow} miles per hour. {start} hours later {second} follows on the"
        f" same road at {slow + gain} miles per hour. How many hours does {second} need to catch up"
        f" with {first}?",
        hours,
        (
            f"{first} is {start} * {slow} = {ahead} miles ahead.",
            f"{second} gains {slow + gain} - {slow} = {gain} miles each hour.",
            f"{ahead} / {gain} = {hours}",
        ),
    )


@story
def minutes_of_practice(d: Draw) -> Problem | None:
    school, weekend, weeks = d.number(15, 60, 5), d.number(30, 120, 10), d.number(2, 12)
    who, what = d.person(), d.word("the piano|the violin|chess|typing|the flute")
    week = 5 * school + 2 * weekend
    hours = whole(weeks * week, 60)
    if hours is None:
        return None
    return Problem(
        f"{who} practises {what} {school} minutes on each of the five school days and {weekend}"
        f" minutes on Saturday and again on Sunday. How many hours of practice are that in {weeks}"
        " weeks?",
        hours,
        (
            f"School days: 5 * {school} = {5 * school} minutes.",
            f"Weekend: 2 * {weekend} = {2 * weekend} minutes.",
            f"{5 * school} + {2 * weekend} = {week} minutes a week.",
            f"{weeks} * {week} = {weeks * week} minutes.",
            f"{weeks * week} / 60 = {hours}",
        ),
    )


@story
def machines(d: Draw) -> Problem | None:
    few, minutes, made = d.number(2, 9), d.number(2, 10), d.number(12, 300, 6)
    many, longer = d.number(3, 20), d.number(5, 60, 5)
    thing, each = d.word("bottles|screws|caps|toys|bricks"), whole(made, few * minutes)
    if each is None or many == few:
        return None
    return Problem(
        f"{few} equal machines make {made} {thing} in {minutes} minutes. How many {thing} do {many}"
        f" such machines make in {longer} minutes?",
        many * longer * each,
        (
            f"One machine makes {made} / {few} = {made // few} {thing} in {minutes} minutes.",
            f"That is {made // few} / {minutes} = {each} a minute.",
            f"{many} machines make {many} * {each} = {many * each} a minute.",
            f"{many * each} * {longer} = {many * each * longer}",
        ),
    )


@story
def tank_with_a_leak(d: Draw) -> Problem | None:
    size = d.number(60, 900, 20)
    tap = d.number(8, 50)
    leak = d.number(2, 7)
    there = d.number(10, 50, 10)
    minutes = whole(size - there, tap - leak)
    if minutes is None or minutes < 3:
        return None
    return Problem(
        f"A tank holds {size} litres and has {there} litres in it. A tap brings {tap} litres a"
        f" minute, and through a leak {leak} litres a minute are lost. After how many minutes is"
        " the tank full?",
        minutes,
        (
            f"{size} - {there} = {size - there} litres are missing.",
            f"{tap} - {leak} = {tap - leak} litres come in each minute.",
            f"{size - there} / {tap - leak} = {minutes}",
        ),
    )


@story
def reading_a_book(d: Draw) -> Problem | None:
    pages = d.number(120, 600, 10)
    first_days = d.number(2, 9)
    slow = d.number(8, 25)
    quick = d.number(20, 50)
    who, read = d.person(), first_days * slow
    more = whole(pages - read, quick) if pages > read else None
    if more is None or quick <= slow:
        return None
    return Problem(
        f"{who} reads a book of {pages} pages: {slow} pages on each of the first {first_days} days,"
        f" then {quick} pages a day until it is finished. On how many days does the reading take"
        " place in all?",
        first_days + more,
        (
            f"{first_days} * {slow} = {read} pages in the first days.",
            f"{pages} - {read} = {pages - read} pages are left.",
            f"{pages - read} / {quick} = {more} more days.",
            f"{first_days} + {more} = {first_days + more}",
        ),
    )


@story
def end_of_the_film(d: Draw) -> Problem | None:
    hour = d.number(1, 7)
    minute = d.number(5, 55, 5)
    length = d.number(80, 170, 5)
    breaks = d.number(5, 25, 5)
    end = 60 * hour + minute + length + breaks
    past = end - 60 * (end // 60)
    if past == 0:
        return None
    return Problem(
        f"A film starts at {hour}:{minute:02d} in the afternoon. It lasts {length} minutes, with a"
        f" break of {breaks} minutes. When it ends, how many minutes have passed since the last"
        " full hour?",
        past,
        (
            f"{length} + {breaks} = {length + breaks} minutes.",
            (
                f"{minute} + {length + breaks} = {minute + length + breaks} minutes after {hour}"
                " o'clock."
            ),
            f"{minute + length + breaks} - {(minute + length + breaks) // 60} * 60 = {past}",
        ),
    )


@story
def laps(d: Draw) -> Problem | None:
    lap, days, distance = d.number(200, 800, 50), d.number(2, 6), d.number(2, 10)
    who, count = d.person(), whole(distance * 1000, lap)
    if count is None:
        return None
    return Problem(
        f"One lap of the track is {lap} metres. {who} wants to run {distance} kilometres on each of"
        f" {days} days. How many laps are that in all?",
        count * days,
        (
            f"{distance} kilometres are {distance} * 1000 = {distance * 1000} metres.",
            f"{distance * 1000} / {lap} = {count} laps a day.",
            f"{count} * {days} = {count * days}",
        ),
    )
