"""Where the page of a run is, and opening it in the user's browser."""

from __future__ import annotations

import os
import threading
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treadle.config.schema import RunConfig

TOKEN_VARIABLE = "TREADLE_HUB_TOKEN"  # noqa: S105 - a variable's name
PATH = "/dash/"


@dataclass(frozen=True)
class RunPage:
    config: RunConfig
    hub_url: str
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    find_browser: Callable[[], webbrowser.BaseBrowser] = webbrowser.get

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
        needs_token = TOKEN_VARIABLE in self.environment or self.config.hub.token_file is not None
        return f"{self.hub_url}/t/TOKEN{PATH} (TOKEN is the hub's token)" if needs_token else f"{self.hub_url}{PATH}"

    def open(self) -> None:
        """Some browsers do not return before they are closed: in a thread of its own."""
        if not self.can_open():
            return
        threading.Thread(target=webbrowser.open, args=(self.address(),), name="browser", daemon=True).start()

    def address(self) -> str:
        """With the token: for the browser alone."""
        token = self.environment.get(TOKEN_VARIABLE, "")
        if not token and self.config.hub.token_file is not None:
            token = Path(self.config.hub.token_file).expanduser().read_text().strip()
        return f"{self.hub_url}/t/{token}{PATH}" if token else f"{self.hub_url}{PATH}"
