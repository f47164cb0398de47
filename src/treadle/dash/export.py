"""Export the page into one HTML file that opens without a server.

The file holds the page's HTML, CSS and JavaScript and, as JSON, the answers that the page would request from a hub
(page/exported.js gives them to it). It loads and sends nothing.

Text of models is untrusted: it is embedded as JSON in which no character can end the script element, the page shows it
as text only, and the Content-Security-Policy allows only the page's own scripts and style, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from treadle.dash.rollouts import GroupView, RolloutView

INDEX, ENTRY_MODULE = "index.html", "app.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=class |function |async function |const )", re.MULTILINE)
_LINKED = re.compile(r"<(?:link [^>]*>|script [^>]*></script>)\n")


def write_export(file: Path, title: str, answers: Mapping[str, Any]) -> None:
    """Write the file atomically."""
    unfinished = file.with_suffix(f".tmp{os.getpid()}")
    unfinished.write_text(export_page(title, answers), encoding="utf-8")
    unfinished.replace(file)


def export_page(title: str, answers: Mapping[str, Any], *, index: str = INDEX, entry: str = ENTRY_MODULE) -> str:
    """`answers`: `kind` ("report", "groups" or "comparison"), the JSON answer of each route, and for the page of a run
    `tabs`, the views to show. `index`: the page; `entry`: its first module."""
    styles = _read("vendor", "uPlot.min.css") + _read("page", "style.css")
    scripts = {"text/javascript": _read("vendor", "uPlot.iife.min.js"), "module": _bundle(entry)}
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts.values())
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'sha256-{_digest(styles)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{styles}</style>\n"
    )
    result = next(answers[name] for name in ("comparison", "report", "now") if name in answers)
    summary = html.escape(" ".join(result["words"]))
    body = (
        f"<noscript><p>{summary} This page needs JavaScript; it loads nothing from anywhere.</p></noscript>\n"
        f'<script type="application/json" id="exported">{embedded(answers)}</script>\n'
        f"<!-- Charts: uPlot\n{_read('vendor', 'uPlot.LICENSE')}-->\n"
        + "".join(f'<script type="{kind}">{script}</script>\n' for kind, script in scripts.items())
    )
    page = _LINKED.sub("", _read("page", index))
    before, _, rest = page.partition("<title>Treadle</title>\n")
    middle, _, end = rest.rpartition("</body>")
    return f"{before}{head}{middle}{body}</body>{end}"


def embedded(data: Any) -> str:
    """Encode as JSON for a script element: it contains no tag, comment or entity, and no line end within a string."""
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")  # they occur within strings only
    return text


def group_answers(views: Iterable[GroupView]) -> dict[str, Any]:
    """The list of groups and the view of each, in the order given."""
    groups, by_id = [], {}
    for view in views:
        by_id[str(view.summary.id)] = view
        rollouts = view.rollouts or []
        summary = {name: getattr(view.summary, name) for name in view.summary.__struct_fields__}
        groups.append(
            {
                **summary,
                "scores": [rollout.score for rollout in rollouts],
                "is_right": [_is_right(rollout) for rollout in rollouts],
            }
        )
    return {"groups": groups, "views": by_id}


def _is_right(rollout: RolloutView) -> bool:
    """By the verdict of the environment; without one, a score above 0."""
    verdict = rollout.details.get("is_right")
    return verdict if isinstance(verdict, bool) else (rollout.score or 0.0) > 0


def _bundle(entry: str) -> str:
    """The module and those it imports as one script, each after its imports. Top-level names are unique in page/."""
    sources: dict[str, str] = {}

    def add(name: str) -> None:
        if name in sources:
            return
        text = _read("page", name)
        for imported in _IMPORT.findall(text):
            add(imported)
        sources[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(entry)
    return "".join(sources.values())


def _read(folder: str, name: str) -> str:
    return files("treadle.dash").joinpath(folder, name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
