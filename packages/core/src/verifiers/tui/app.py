"""The application: a stack of three screens, and the keys to navigate between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from verifiers.runtime.terminal import escape_control
from verifiers.tui.lines import Entry, Lines
from verifiers.tui.texts import (
    ROW_TITLE,
    RUN_TITLE,
    heading,
    numbers_text,
    rollout_text,
    row_line,
    run_line,
)
from verifiers.view.catalog import TRAINING
from verifiers.view.describe import RunEntry
from verifiers.view.library import Library
from verifiers.view.rollout import Page

LOOK_S = 1.0
"""Seconds between two checks of a screen for new data."""
_BACK = Binding("b,escape", "app.leave", "back")
_SEARCH = Binding("s,slash", "search", "search")
_SORT = Binding("o", "sort", "sort by the next column")
_REVERSE = Binding("r", "reverse", "reverse")
RUN_COLUMNS: dict[str, Callable[[RunEntry], object]] = {
    "Run": lambda run: (run["env"], run["model"], run["date"]),
    "Model": lambda run: run["model"],
    "Reward": lambda run: run["reward"],
    "Rollouts": lambda run: run["rollouts"],
    "Errors": lambda run: run["errors"],
    "Status": lambda run: run["status"],
    "Date": lambda run: run["date"],
}
"""Column title -> the value that sorts runs."""
ROW_COLUMNS = {
    "#": "example",
    "Reward": "reward",
    "Turns": "turns",
    "Tokens": "output_tokens",
    "Time": "total_ms",
    "Stopped by": "stopped",
}
"""Column title -> the column that sorts rollouts."""


class ListScreen(Screen[None], Generic[Entry]):
    """A title, the list's state (its order and filters), its ``entries``, and a search line."""

    def __init__(self, title: str, heading: str, columns: Sequence[str]):
        super().__init__()
        self.title, self.heading, self.query_text = title, heading, ""
        self.columns, self.sorted_by, self.is_reversed = columns, columns[0], False
        self.version = ""
        self.lines = Lines(self.line)

    def compose(self) -> ComposeResult:
        """Title, numbers, state, column titles, list, search line."""
        yield Static(self.title or "", classes="title", markup=False)
        yield Static("", classes="numbers", markup=False)
        yield Static("", classes="state", markup=False)
        yield Static("", classes="heading", markup=False)
        yield self.lines
        search = Input(placeholder="search, Enter to apply, empty for all")
        search.display = False
        yield search
        yield Footer()

    def on_mount(self) -> None:
        """Fill the list, and refresh it every ``LOOK_S``."""
        self.look()
        self.lines.focus()
        self.set_interval(LOOK_S, self.look)

    def look(self) -> None:
        """Refill the list when its data has changed."""
        version = self.current_version()
        if version != self.version:
            self.version = version
            self.show()

    def show(self) -> None:
        """Fill the list anew, and say how it is sorted and filtered."""
        self.lines.show(self.entries())
        self.query_one(".heading", Static).update(heading(self.heading, self.sorted_by))
        order = f"sorted by {self.sorted_by}, {'descending' if self.is_reversed else 'ascending'}"
        num_shown = f"{len(self.lines.entries):,} listed"
        self.query_one(".state", Static).update(" · ".join([num_shown, order, *self.filters()]))

    def filters(self) -> list[str]:
        """What each filter that is on keeps."""
        return [f"contains “{escape_control(self.query_text)}”"] if self.query_text else []

    def action_sort(self) -> None:
        """Sort by the next column."""
        columns = self.columns
        self.sorted_by = columns[(columns.index(self.sorted_by) + 1) % len(columns)]
        self.show_from_the_top()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.is_reversed = not self.is_reversed
        self.show_from_the_top()

    def show_from_the_top(self) -> None:
        """Fill the list anew, with the cursor on its first entry."""
        self.show()
        self.lines.action_jump(0)

    def action_search(self) -> None:
        """Open the search line."""
        search = self.query_one(Input)
        search.display = True
        search.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show the entries that contain the text."""
        self.query_text = event.value.strip()
        event.input.display = bool(self.query_text)
        self.show_from_the_top()
        self.lines.focus()

    def line(self, entry: Entry) -> Text:
        """The text of an entry."""
        raise NotImplementedError

    def entries(self) -> Sequence[Entry]:
        """The listed entries."""
        raise NotImplementedError

    def current_version(self) -> str:
        """A token that changes with the listed data."""
        raise NotImplementedError


class RunsScreen(ListScreen[RunEntry]):
    """Every run, by environment, model and date."""

    BINDINGS: ClassVar[list[BindingType]] = [_SEARCH, _SORT, _REVERSE]

    def __init__(self, library: Library):
        super().__init__("runs", RUN_TITLE, tuple(RUN_COLUMNS))
        self.library = library

    def line(self, entry: RunEntry) -> Text:
        return run_line(entry)

    def entries(self) -> Sequence[RunEntry]:
        words = self.query_text.casefold().split()
        runs = []
        for run in self.library.runs()["runs"]:
            text = f"{run['env']} {run['model']} {run['id']}".casefold()
            if all(word in text for word in words):
                runs.append(run)
        by_run = ordered(runs, RUN_COLUMNS["Run"])
        return ordered(by_run, RUN_COLUMNS[self.sorted_by], self.is_reversed)

    def current_version(self) -> str:
        return str(self.library.version()["version"])

    def on_lines_opened(self) -> None:
        """Show the rollouts of a run; of a training run, those of its newest step."""
        run, step = self.lines.entry, None
        assert run is not None  # a line was opened
        if run["kind"] == TRAINING:
            steps = self.library.run(run["id"])["steps"]
            if not steps:
                self.notify(run.get("ended") or "this training run has saved no rollouts yet")
                return
            step = steps[-1]
        self.app.push_screen(RowsScreen(self.library, run, step))


class RowsScreen(ListScreen[int]):
    """The numbers of a run and its rollouts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        _SEARCH,
        _SORT,
        _REVERSE,
        Binding("e", "errors", "errors only"),
        _BACK,
    ]

    def __init__(self, library: Library, run: RunEntry, step: int | None):
        where = "" if step is None else f" · step {step}"
        title = f"{run['env']} · {run['model']}{where} · {run['id']}"
        super().__init__(title, ROW_TITLE, tuple(ROW_COLUMNS))
        self.library, self.run, self.step = library, run["id"], step
        self.facts: dict[str, list[Any]] = {}
        self.has_errors_only = False

    def look(self) -> None:
        """Refill the list and compute the numbers anew when the data has changed."""
        before = self.version
        super().look()
        if self.version != before:
            numbers = self.library.numbers(self.run, self.step)
            self.query_one(".numbers", Static).update(numbers_text(numbers))

    def filters(self) -> list[str]:
        return [*super().filters(), *(["errors only"] if self.has_errors_only else [])]

    def action_errors(self) -> None:
        """List only rollouts with an error, or all again."""
        self.has_errors_only = not self.has_errors_only
        self.show_from_the_top()

    def line(self, entry: int) -> Text:
        preview = self.library.previews(self.run, [entry], self.step)["previews"][str(entry)]
        return row_line({name: values[entry] for name, values in self.facts.items()}, preview)

    def entries(self) -> Sequence[int]:
        response = self.library.columns(self.run, self.step, budget_s=math.inf)
        for name, column in response["columns"].items():
            if isinstance(column, list):
                self.facts[name] = column
            else:
                names = column["names"]
                self.facts[name] = [None if code < 0 else names[code] for code in column["codes"]]
        rows: Sequence[int] = range(response["total"])
        if self.query_text:
            search = self.library.search
            rows = search(self.run, self.query_text, step=self.step, budget_s=math.inf)["rows"]
        replaced = set(response["replaced"])
        error, stop = self.facts["error"], self.facts["stop_condition"]
        self.facts["stopped"] = [e or c for e, c in zip(error, stop, strict=True)]
        rows = [row for row in rows if row not in replaced]
        listed = [row for row in rows if error[row]] if self.has_errors_only else rows
        example, sibling = self.facts["example"], self.facts["sibling"]
        values = self.facts[ROW_COLUMNS[self.sorted_by]]
        by_example = ordered(sorted(listed, key=lambda row: sibling[row]), lambda row: example[row])
        return ordered(by_example, lambda row: values[row], self.is_reversed)

    def current_version(self) -> str:
        return str(self.library.version(self.run)["version"])

    def on_lines_opened(self) -> None:
        """Show one rollout."""
        self.app.push_screen(RolloutScreen(self.library, self))


class RolloutScreen(Screen[None]):
    """A rollout; previous and next follow the list it was opened from."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "turn(1)", "next"),
        Binding("left,h", "turn(-1)", "previous"),
        Binding("down,j", "scroll_by(2)", "down", show=False),
        Binding("up,k", "scroll_by(-2)", "up", show=False),
        Binding("c", "copy", "copy"),
        _BACK,
    ]

    def __init__(self, library: Library, rows: RowsScreen):
        super().__init__()
        self.library, self.rows = library, rows

    def compose(self) -> ComposeResult:
        """The title with the position in the list, and the conversation."""
        yield Static("", classes="title", markup=False)
        with VerticalScroll():
            yield Static("", id="rollout", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Show the rollout under the cursor of the list."""
        self.action_turn(0)
        self.query_one(VerticalScroll).focus()

    def rollout(self) -> Page:
        """The rollout under the cursor of the list."""
        number = self.rows.lines.entry
        assert number is not None  # it was opened
        return self.library.rollout(self.rows.run, number, self.rows.step)

    def action_turn(self, by: int) -> None:
        """Show another rollout of the list."""
        lines = self.rows.lines
        lines.action_move(by)
        rollout = self.rollout()
        position = f"{lines.cursor + 1:,} of {len(lines.entries):,}"
        self.query_one(".title", Static).update(
            f"example {rollout['example_id']} · {position} · {self.rows.title}"
        )
        self.query_one("#rollout", Static).update(rollout_text(rollout))
        self.query_one(VerticalScroll).scroll_home(animate=False)

    def action_scroll_by(self, lines: int) -> None:
        """Scroll the conversation."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    def action_copy(self) -> None:
        """Copy the conversation to the clipboard, with control characters escaped."""
        self.app.copy_to_clipboard(rollout_text(self.rollout()).plain)
        self.notify("copied")


class RunsApp(App[None]):
    """The application of ``vf-tui``."""

    TITLE = "vf-tui"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "quit")]
    CSS = """
    .title { background: $panel; padding: 0 1; text-style: bold; height: 1; }
    .numbers { padding: 0 1; height: auto; }
    RunsScreen .numbers { display: none; }
    .state { padding: 0 1; height: 1; color: $text-muted; text-style: italic; }
    .heading { color: $text-muted; height: 1; }
    Lines { height: 1fr; }
    Input { dock: bottom; margin-bottom: 1; }
    #rollout { padding: 0 1; }
    """

    def __init__(self, library: Library):
        super().__init__()
        self.library = library

    def on_mount(self) -> None:
        """Show the list of runs."""
        self.push_screen(RunsScreen(self.library))

    def action_leave(self) -> None:
        """Leave this screen for the screen below it."""
        if len(self.screen_stack) > 2:
            self.pop_screen()


def ordered(
    entries: Iterable[Entry], value: Callable[[Entry], Any], is_reversed: bool = False
) -> list[Entry]:
    """The entries sorted by a value, equal entries in their order; those with an unknown value are
    last.

    >>> ordered(["a", "bb", "c"], {"a": 1.0, "bb": None, "c": 2.0}.get, is_reversed=True)
    ['c', 'a', 'bb']
    """
    pairs = [(value(entry), entry) for entry in entries]
    with_value = [pair for pair in pairs if pair[0] is not None and pair[0] == pair[0]]
    without_value = [pair for pair in pairs if pair[0] is None or pair[0] != pair[0]]
    kinds = {float if isinstance(key, int | float) else type(key) for key, _ in with_value}
    is_plain = len(kinds) < 2  # ids of examples may be numbers and texts
    with_value.sort(key=lambda pair: pair[0] if is_plain else str(pair[0]), reverse=is_reversed)
    return [entry for _, entry in (*with_value, *without_value)]
