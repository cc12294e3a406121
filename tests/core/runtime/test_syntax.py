"""Python source is parsed from several threads at once."""

import ast
import contextlib
import sys
import threading
from pathlib import Path

import pytest

import verifiers
from verifiers.runtime.syntax import parse_python

SOURCES = [path.read_bytes() for path in sorted(Path(verifiers.__file__).parent.glob("r*/*.py"))]
HAS_SHARED_DEPTH = sys.version_info < (3, 11, 9) or (3, 12) <= sys.version_info < (3, 12, 3)


class Cycle:
    """Collected while a tree is constructed; its finalizer lets another thread run."""

    def __init__(self):
        self.me = self

    def __del__(self):
        pass


def num_failures(*parsers):
    failures = []

    def parse_all(parser):
        for source in SOURCES:
            Cycle()
            try:
                parser(source)
            except SystemError as error:
                failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=parse_all, args=(parser,)) for parser in parsers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return len(failures)


def test_threads_parse_at_once():
    assert num_failures(parse_python, parse_python, parse_python) == 0


def test_threads_of_other_libraries_parse_beside_them():
    def foreign(source):
        with contextlib.suppress(SystemError):
            ast.parse(source)

    assert num_failures(parse_python, foreign, foreign) == 0


@pytest.mark.skipif(
    not HAS_SHARED_DEPTH, reason="this Python counts the depth of each thread apart"
)
def test_the_parser_of_python_itself_fails():
    assert num_failures(ast.parse, ast.parse, ast.parse) > 0


def test_a_tree_is_that_of_python_itself():
    for source in SOURCES:
        assert ast.dump(parse_python(source)) == ast.dump(ast.parse(source))


def test_wrong_source_is_refused_with_its_line():
    with pytest.raises(SyntaxError) as caught:
        parse_python("x = 1\ny = (", "mine.py")
    assert (caught.value.filename, caught.value.lineno) == ("mine.py", 2)
