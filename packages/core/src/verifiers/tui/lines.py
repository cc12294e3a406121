"""A virtual list for the terminal: only visible lines are rendered, so the cost does not grow with
its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

if TYPE_CHECKING:
    from textual.events import Click

CURSOR = Style(bgcolor="#2a3f6b", color="#ffffff")


Entry = TypeVar("Entry")


class Lines(ScrollView, Generic[Entry], can_focus=True):
    """Shows ``entries``, each as ``line(entry)``. Enter or a click posts ``Lines.Opened``: the entry
    under the cursor is opened."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("home", "jump(0)", "first", show=False),
        Binding("end", "jump(-1)", "last", show=False),
        Binding("enter", "open", "open"),
    ]

    class Opened(Message):
        """Posted when an entry is opened."""

    def __init__(self, line: Callable[[Entry], Text]):
        super().__init__()
        self.line = line
        self.entries: Sequence[Entry] = ()
        self.cursor = 0

    def show(self, entries: Sequence[Entry]) -> None:
        """Replace the entries; the cursor stays at its index, or moves to the last entry."""
        self.entries = entries
        self.cursor = max(0, min(self.cursor, len(entries) - 1))
        self.virtual_size = Size(self.size.width, len(entries))
        self.refresh()

    @property
    def entry(self) -> Entry | None:
        """The entry under the cursor; None when there is none."""
        return self.entries[self.cursor] if self.entries else None

    def render_line(self, y: int) -> Strip:
        """Render one line of the screen."""
        number, width = self.scroll_offset.y + y, self.size.width
        if number >= len(self.entries):
            return Strip.blank(width, self.rich_style)
        text = self.line(self.entries[number])
        style = self.rich_style + (CURSOR if number == self.cursor else Style())
        segments = [
            Segment(segment.text.replace("\n", " "), style + (segment.style or Style()))
            for segment in text.render(self.app.console)
            if segment.text != "\n"
        ]
        return Strip(segments).adjust_cell_length(width, style).crop(0, width)

    def action_move(self, by: int) -> None:
        """Move the cursor by some lines."""
        self.cursor = max(0, min(len(self.entries) - 1, self.cursor + by))
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False)
        self.refresh()

    def action_page(self, direction: int) -> None:
        """Move the cursor by a screen."""
        self.action_move(direction * max(1, self.size.height - 1))

    def action_jump(self, to: int) -> None:
        """Move the cursor to the first line, or (-1) to the last."""
        self.action_move((len(self.entries) if to < 0 else 0) - self.cursor)

    def action_open(self) -> None:
        """Open the entry under the cursor."""
        if self.entries:
            self.post_message(self.Opened())

    def on_click(self, event: Click) -> None:
        """Move the cursor to the clicked line; a click on the cursor opens the entry."""
        number = self.scroll_offset.y + event.y
        if number == self.cursor:
            self.action_open()
        elif number < len(self.entries):
            self.action_move(number - self.cursor)
