"""Promise: what a model writes is data, and costs no more than its length."""

import re
import time

import verifiers as vf


def test_parsers_are_linear_in_hostile_text():
    bombs = [
        "<a>" * 300_000,
        "<a><b>" * 150_000,
        "\\boxed{" * 140_000,
        "<think>" * 140_000,
        "<a>" + "x" * 1_000_000,
    ]
    parsers = [
        vf.XMLParser(["a", "b"]),
        vf.ThinkParser(vf.extract_boxed_answer),
        vf.MaybeThinkParser(),
    ]
    for text in bombs:
        for parser in parsers:
            started = time.thread_time()
            parser.parse_answer([{"role": "assistant", "content": text}])
            assert time.thread_time() - started < 0.5, (type(parser).__name__, text[:20])


def test_a_pattern_that_tries_again_from_every_tag_takes_the_square_of_the_length():
    """Negative control: four times the text takes about sixteen times as long."""

    def seconds(length):
        started = time.thread_time()
        re.findall(r"<a>.*?</a>", "<a>" * length, re.DOTALL)
        return time.thread_time() - started

    assert seconds(8_000) > 6 * seconds(2_000)
