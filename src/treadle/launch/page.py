"""Print the address of a run's page, and open it in the user's browser."""

from __future__ import annotations

import os
import threading
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PATH = "/dash/"


@dataclass(frozen=True)
class RunPage:
    hub_url: str
    watch_url: str = field(repr=False)  # the same with an observer's token, where the hub asks for one
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    find_browser: Callable[[], webbrowser.BaseBrowser] = webbrowser.get
    path: str = PATH

    def announcement(self, *, opens: bool) -> str:
        """What to tell the user at the start; `opens`: whether they asked for the page to be opened."""
        by_hand = "; no browser was found on this machine: open it by hand" if opens and not self.can_open() else ""
        return f"page: {self.shown_url}{by_hand}"

    def can_open(self) -> bool:
        """Not in a browser without a window, which would take the terminal, unless the user chose it."""
        try:
            browser = self.find_browser()
        except webbrowser.Error:
            return False
        return type(browser) is not webbrowser.GenericBrowser or "BROWSER" in self.environment

    @property
    def shown_url(self) -> str:
        """Without the token, which must not end up in a log."""
        if self.watch_url == self.hub_url:
            return f"{self.hub_url}{self.path}"
        return f"{self.hub_url}/t/TOKEN{self.path} (`treadle token observer` prints TOKEN)"

    def open(self, *, within_s: float = 0.0) -> None:
        """Open it in a thread, because some browsers return only when closed; wait up to `within_s` for the thread."""
        if not self.can_open():
            return
        thread = threading.Thread(target=webbrowser.open, args=(self.address(),), name="browser", daemon=True)
        thread.start()
        thread.join(within_s)

    def address(self) -> str:
        """With the token: for the browser alone."""
        return f"{self.watch_url}{self.path}"
