"""The story of a job for a person: one HTML page, one picture, or text, each from the event log alone.

The page is a single file without scripts and without anything from outside: tables and inline SVG. What colour says,
words, shapes and hatching say too. It follows the reader's light or dark setting; each worker's bar and each mark can
be reached with the tab key and tells what it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from elastic_spark.core import events as ev
from elastic_spark.core.metrics import summarise
from elastic_spark.core.timeline import Bar, Timeline, thin, timeline
from elastic_spark.core.verdict import change_line, epoch_line, seconds, verdict
from elastic_spark.errors import EnvironmentUnfit

WIDTH, LEFT, RIGHT, ROW = 960, 150, 20, 18
#: Bars and table lines that a page shows at most.
MOST_BARS, MOST_LINES = 150, 1000
#: Events that come by the second: in the curves, not in the table.
QUIET = (ev.StepsCommitted, ev.MetricsReported, ev.WorkerOutput)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #d7dce2; --soft: #5b6570; --bar: #2f6fb0;
  --warm: #a9c4e0; --bad: #b3261e; --ok: #1f6f43; --mark: #7a4fb5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #15181c; --faint: #343b44; --soft: #9aa5b1;
  --bar: #6aa9e9; --warm: #35506b; --bad: #ff8a80; --ok: #7fd6a4; --mark: #c9a6f5; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1000px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .6rem; vertical-align: top;
  border-bottom: 1px solid var(--faint); overflow-wrap: anywhere; } th { font-weight: 600; white-space: nowrap; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bad { color: var(--bad); font-weight: 600; } .ok { color: var(--ok); } .soft { color: var(--soft); }
.wide, .chart { overflow-x: auto; } .wide td { overflow-wrap: break-word; } td.mark { white-space: nowrap; }
svg { max-width: 100%; min-width: 520px; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
svg .soft { fill: var(--soft); } svg .axis { stroke: var(--faint); } svg .line { fill: none; stroke: var(--bar);
  stroke-width: 1.6; } svg .change { stroke: var(--soft); stroke-dasharray: 3 3; }
svg :focus { outline: 3px solid var(--mark); } summary:focus-visible, .wide:focus-visible {
  outline: 3px solid var(--mark); } pre { white-space: pre-wrap; }
@media print { details > * { display: block; } }
"""


def render_html(events: Iterable[ev.Event], title: str) -> str:
    """The page. ``events`` is the log, in order; an empty one gives a page that says so."""
    log = list(events)
    return render_document(title, render_story(summarise(log), timeline(log), log))


def render_document(title: str, story: str, head: str = "", before: str = "", after: str = "") -> str:
    """A whole page around the markup of `render_story`; ``head``, ``before`` and ``after`` are markup, too."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style>{head}</head>\n<body><main>\n<h1>{_text(title)}</h1>"
        f'{before}\n<div id="story">{story}</div>\n</main>{after}</body></html>\n'
    )


def render_story(summary: Mapping[str, Any], story: Timeline, log: Sequence[ev.Event]) -> str:
    """What a page says below its title. ``log``: the events to list, of which those that come by the second are left
    out."""
    parts = [
        f'<p class="soft">{_text(_when(summary))}</p>',
        "<h2>Verdict</h2>",
        _verdict_table(summary),
        "<h2>Workers over time</h2>",
        _members_svg(story, summary),
        f"<h2>Throughput ({story.unit}) and number of workers</h2>",
        _speed_svg(story),
        *_series(story),
        "<h2>Changes</h2>",
        _changes_table(summary, story.begin),
        "<h2>Rows by epoch</h2>",
        _epochs_table(summary),
        "<h2>Checkpoints</h2>",
        _checkpoints_table(summary, story.begin),
        "<h2>Events</h2>",
        _events_table(log, story.begin),
    ]
    return "\n".join(parts)


def render_text(summary: Mapping[str, Any]) -> str:
    """The verdict, then one line for each change and each epoch, from a summary of `core.metrics`."""
    lines = verdict(summary)
    width = max(len(label) for label, _, _ in lines)
    out = [f"{'!' if mark == 'bad' else ' '} {label:<{width}}  {text}" for label, text, mark in lines]
    if summary["changes"]:
        begin = summary["started_at"]
        out += ["", "Changes"]
        out += [f"  {seconds(change['at'] - begin):>12}  {change_line(change)}" for change in summary["changes"]]
    if summary["epochs"]:
        out += ["", "Epochs"]
        out += [f"  {epoch_line(epoch)}" for epoch in summary["epochs"]]
    return "\n".join(out) + "\n"


def render_png(events: Iterable[ev.Event], path: str | Path) -> None:
    """The timeline as a picture: workers as bars, changes, throughput.

    Raises:
        EnvironmentUnfit: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentUnfit("a picture needs matplotlib: pip install matplotlib") from error
    log = list(events)
    story, summary = timeline(log), summarise(log)
    shown = story.bars[:MOST_BARS]
    figure = Figure(figsize=(10, 3.2 + 0.18 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    members, speed = figure.subplots(2, 1, sharex=True, height_ratios=[max(1.0, 0.09 * len(shown)), 1.0])
    for row, bar in enumerate(shown):
        joined, ended = bar.joined if bar.joined is not None else bar.ended, bar.ended or story.end
        waits = (joined if joined is not None else ended) - bar.spawned
        members.barh(row, waits, left=bar.spawned - story.begin, color="#a9c4e0", hatch="///", height=0.7)
        if bar.joined is not None:
            members.barh(row, ended - bar.joined, left=bar.joined - story.begin, color="#2f6fb0", height=0.7)
        if bar.end:
            style = {"lost": "X", "left": ">"}[bar.end]
            members.plot(ended - story.begin, row, style, color="#b3261e" if bar.end == "lost" else "#1f6f43")
    members.set_yticks(range(len(shown)), [bar.worker for bar in shown], fontsize=7)
    members.invert_yaxis()
    members.set_title("members (hatched: warming; X: lost; >: left), changes dashed, checkpoints as diamonds")
    for change in summary["changes"]:
        for axes in (members, speed):
            axes.axvline(change["at"] - story.begin, color="#5b6570", linestyle="--", linewidth=0.8)
    points = [at - story.begin for at, kind, _ in story.marks if kind == "checkpoint"]
    members.plot(points, [len(shown)] * len(points), "D", color="#7a4fb5", markersize=4)
    if story.speed:
        edges = [begin - story.begin for begin, _, _ in story.speed] + [story.speed[-1][1] - story.begin]
        speed.stairs([value for _, _, value in story.speed], edges, color="#2f6fb0")
    speed.set_ylim(bottom=0)
    speed.set_ylabel(story.unit)
    speed.set_xlabel("seconds")
    figure.savefig(str(path), dpi=110)


# --- tables ---------------------------------------------------------------------------------------------------------


def _verdict_table(summary: Mapping[str, Any]) -> str:
    rows = []
    for label, text, mark in verdict(summary):
        sign = {"ok": '<span class="ok">\u2713 ok</span>', "bad": '<span class="bad">\u2717 look</span>'}.get(mark, "")
        rows.append(f'<tr><th scope="row">{label}</th><td>{_text(text)}</td><td class="mark">{sign}</td></tr>')
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _changes_table(summary: Mapping[str, Any], begin: float) -> str:
    heads = ("at", "generation", "cause", "workers", "who", "pause", "back at 90 %")
    rows = []
    for change in summary["changes"]:
        who = "; ".join(f"{what} {', '.join(change[what])}" for what in ("joined", "lost", "left") if change[what])
        sizes = f"{change['from_size']} \u2192 {change['to_size']}"
        pause, back = seconds(change["pause_s"]), seconds(change["rto_s"])
        rows.append((_since(change["at"], begin), change["generation"], change["cause"], sizes, who, pause, back))
    return _table(heads, rows, "The world never changed.")


def _epochs_table(summary: Mapping[str, Any]) -> str:
    names = ("rows_once", "rows_twice", "rows_never", "rows_open", "rows_inherited")
    heads = ("data set", "epoch", "rows", "once", "twice", "never", "open", "checkpoint only", "finished", "sequence")
    rows = [
        (
            *(e["dataset"], e["epoch"] + 1, e["rows"]),
            *(e[name] for name in names),
            *("yes" if e["finished"] else "no", (e["digest"] or "not known")[:16]),
        )
        for e in summary["epochs"]
    ]
    return _table(heads, rows, "No data set of the job was frozen: nothing to audit.")


def _checkpoints_table(summary: Mapping[str, Any], begin: float) -> str:
    heads = ("at", "step", "workers", "MB", "written in", "where", "digest")
    rows = [
        (
            _since(c["at"], begin),
            c["step"],
            c["world_size"],
            f"{c['bytes'] / 1e6:,.1f}",
            seconds(c["seconds"]),
            c["uri"],
            c["digest"][:19],
        )
        for c in summary["checkpoints"]
    ]
    return _table(heads, rows, "No checkpoint was written.")


def _events_table(log: Sequence[ev.Event], begin: float) -> str:
    told = [event for event in log if not isinstance(event, QUIET)]
    rows = []
    for event in told[:MOST_LINES]:
        fields = {
            k: v
            for k, v in vars(event).items()
            if k not in ("at", "config", "lanes", "tail", "traceback") and v not in ("", (), None)
        }
        rows.append(
            (_since(event.at, begin), type(event).__name__, ", ".join(f"{k}={_short(v)}" for k, v in fields.items()))
        )
    note = f" (the first {MOST_LINES:,})" if len(told) > MOST_LINES else ""
    table = _table(("at", "event", "what"), rows, "The log is empty.")
    tails = [(e.worker, e.tail) for e in log if isinstance(e, ev.WorkerLost) and e.tail]
    tails += [(e.worker, e.traceback) for e in log if isinstance(e, ev.UserFailed)]
    last = "".join(f"<h3>Last output of {_text(who)}</h3><pre>{_text(text)}</pre>" for who, text in tails[:20])
    return f"<details><summary>{len(told):,} events{note}</summary>{table}</details>{last}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> str:
    if not rows:
        return f'<p class="soft">{empty}</p>'
    kinds = [' class="number"' if isinstance(value, int) else "" for value in rows[0]]
    head = "".join(f'<th scope="col"{kind}>{_text(name)}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = []
    for row in rows[:MOST_LINES]:
        cells = (f'<td class="number">{v:,}</td>' if isinstance(v, int) else f"<td>{_text(v)}</td>" for v in row)
        body.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'


# --- pictures -------------------------------------------------------------------------------------------------------


class _Scale:
    """Times to x. ``span`` seconds over the width between the margins."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.span = begin, max(1e-9, end - begin)

    def __call__(self, at: float) -> float:
        return round(LEFT + (at - self.begin) / self.span * (WIDTH - LEFT - RIGHT), 2)

    def axis(self, y: float) -> str:
        ticks = []
        for i in range(6):
            at = self.begin + self.span * i / 5
            ticks.append(
                f'<text class="soft" x="{self(at)}" y="{y + 16}" text-anchor="middle">{seconds(at - self.begin)}</text>'
            )
        return f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>' + "".join(ticks)


def _members_svg(story: Timeline, summary: Mapping[str, Any]) -> str:
    if not story.bars:
        return '<p class="soft">No worker was started.</p>'
    x, shown = _Scale(story.begin, story.end), story.bars[:MOST_BARS]
    floor = 30 + ROW * (len(shown) + 1)
    out = [_hatch()]
    for number, change in enumerate(summary["changes"], 1):
        at = x(change["at"])
        out.append(f'<line class="change" x1="{at}" x2="{at}" y1="22" y2="{floor}"/>')
        out.append(_focus(f'<text x="{at}" y="16" text-anchor="middle">{number}</text>', change_line(change)))
    out += [_bar_svg(bar, 30 + ROW * row, x, story.end) for row, bar in enumerate(shown)]
    y = 30 + ROW * len(shown) + 9
    out.append(f'<text class="soft" x="0" y="{y + 4}">checkpoints</text>')
    for at, kind, words in story.marks:
        shape = {"checkpoint": "\u25c6", "roll-back": "\u21ba", "failure": "\u2717"}[kind]
        fill = "var(--bad)" if kind == "failure" else "var(--mark)"
        text = f'<text x="{x(at)}" y="{y + 4}" text-anchor="middle" style="fill:{fill}">{shape}</text>'
        out.append(_focus(text, f"{words}, {_since(at, story.begin)}"))
    more = f" {len(story.bars) - len(shown)} more workers are not drawn." if len(story.bars) > len(shown) else ""
    legend = (
        "Solid: member of the world. Hatched: process warming up or waiting. \u2715 lost, \u25b8 left in good order, "
        "\u25c6 checkpoint, \u21ba steps undone. Dashed lines with numbers: changes, in the order of the table below."
    )
    return _svg(floor + 24, "".join([*out, x.axis(floor)]), "Workers over time") + f'<p class="soft">{legend}{more}</p>'


def _bar_svg(bar: Bar, y: int, x: _Scale, end: float) -> str:
    ended = bar.ended if bar.ended is not None else end
    joined = bar.joined if bar.joined is not None else ended
    words = f"{bar.worker}{f' on {bar.host}' if bar.host else ''}: started {_since(bar.spawned, x.begin)}"
    words += f", member from {_since(bar.joined, x.begin)}" if bar.joined is not None else ", never a member"
    words += f", {bar.end} {_since(ended, x.begin)} ({bar.why})" if bar.end else ", there to the end"
    sign = {"lost": ("\u2715", "var(--bad)"), "left": ("\u25b8", "var(--ok)")}.get(bar.end)
    out = f'<text x="0" y="{y + 12}">{_text(_short(f"{bar.worker} {bar.host}", 22))}</text>'
    out += _rect(x(bar.spawned), x(joined), y, "url(#warm)") + _rect(x(joined), x(ended), y, "var(--bar)")
    if sign:
        out += f'<text x="{min(x(ended) + 2, WIDTH - 12)}" y="{y + 12}" style="fill:{sign[1]}">{sign[0]}</text>'
    return _focus(out, words)


def _speed_svg(story: Timeline) -> str:
    if not story.speed:
        return '<p class="soft">Too few steps for a chart.</p>'
    x, height = _Scale(story.begin, story.end), 150
    top, most = max(value for _, _, value in story.speed) or 1.0, max((n for _, n in story.sizes), default=1) or 1
    path = "".join(
        f"{'M' if i == 0 else 'L'}{x(begin)} {_y(value, top, height)}L{x(end)} {_y(value, top, height)}"
        for i, (begin, end, value) in enumerate(story.speed)
    )
    edges = [*story.sizes[1:], (story.end, 0)][: len(story.sizes)]
    sizes = "".join(
        f"{'M' if i == 0 else 'L'}{x(at)} {_y(n, most, height)}L{x(until)} {_y(n, most, height)}"
        for i, ((at, n), (until, _)) in enumerate(zip(story.sizes, edges, strict=True))
    )
    dashes = "stroke:var(--mark);stroke-dasharray:6 3"
    out = f'<path class="line" d="{path}"/><path class="line" d="{sizes}" style="{dashes}"/>'
    out += f'<text x="0" y="24">{top:,.0f} {story.unit} (solid)</text><text x="0" y="42">{most} workers (dashed)</text>'
    out += f'<text class="soft" x="{LEFT - 8}" y="{height}" text-anchor="end">0</text>'
    mean = sum(value for _, _, value in story.speed) / len(story.speed)
    words = f"Throughput: mean {mean:,.1f}, highest {top:,.1f} {story.unit}; at most {most} workers"
    return _svg(height + 24, out + x.axis(height), words)


def _series(story: Timeline) -> list[str]:
    """One chart for each of the first four metrics, by step."""
    out = []
    for name, points in list(story.series.items())[:4]:
        kept = thin(points, 400)
        if len({value for _, value in kept}) < 2:  # a constant needs no chart
            continue
        first, last = min(step for step, _ in kept), max(step for step, _ in kept)
        low, high = min(value for _, value in kept), max(value for _, value in kept)
        across, range_ = (WIDTH - LEFT - RIGHT) / max(1, last - first), (high - low) or 1.0
        path = "L".join(f"{LEFT + (step - first) * across:.1f} {_y(value - low, range_, 120)}" for step, value in kept)
        text = (
            f'<path class="line" d="M{path}"/><text x="0" y="24">{high:.4g}</text><text x="0" y="120">{low:.4g}</text>'
        )
        text += f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="120" y2="120"/>'
        text += f'<text class="soft" x="{LEFT}" y="136">step {first:,}</text>'
        text += f'<text class="soft" x="{WIDTH - RIGHT}" y="136" text-anchor="end">step {last:,}</text>'
        words = f"{name} from {kept[0][1]:.4g} at step {kept[0][0]:,} to {kept[-1][1]:.4g} at step {kept[-1][0]:,}"
        out += [f"<h2>{_text(name)}</h2>", _svg(142, text, words), f'<p class="soft">{_text(words)}</p>']
    return out


def _y(value: float, top: float, height: int) -> float:
    return round(height - value / top * (height - 14), 2)


def _rect(left: float, right: float, y: int, fill: str) -> str:
    return f'<rect x="{left}" y="{y + 2}" width="{max(0.0, right - left):.2f}" height="{ROW - 5}" style="fill:{fill}"/>'


def _focus(content: str, words: str) -> str:
    """Something that can be pointed at and reached with the tab key, and says what it is."""
    return f'<g tabindex="0" role="img" aria-label="{_text(words)}"><title>{_text(words)}</title>{content}</g>'


def _hatch() -> str:
    lines = '<rect width="6" height="6" style="fill:var(--warm)"/><path d="M0 6L6 0" style="stroke:var(--soft)"/>'
    return f'<defs><pattern id="warm" width="6" height="6" patternUnits="userSpaceOnUse">{lines}</pattern></defs>'


def _svg(height: int, content: str, words: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<div class="chart"><svg {box} role="group" aria-label="{_text(words)}">{content}</svg></div>'


def _text(value: object) -> str:
    """Escaped, without the control characters that HTML does not allow."""
    return escape("".join(c for c in str(value) if c in "\n\t" or (c.isprintable() and c != "\x7f")))


def _short(value: object, most: int = 160) -> str:
    text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _since(at: float, begin: float) -> str:
    return f"+{seconds(at - begin)}"


def _when(summary: Mapping[str, Any]) -> str:
    if summary["started_at"] is None:
        return "The log is empty."
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(summary["started_at"]))
    names = (("job", summary["job_name"]), ("id", summary["job_id"]), ("MLflow run", summary["run_id"]))
    return ", ".join([*(f"{label} {value}" for label, value in names if value), f"started {at}"])
