"""The page, the picture and the text, from the log alone."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from elastic_spark import report
from elastic_spark.core import events as ev
from elastic_spark.core.metrics import summarise
from elastic_spark.errors import EnvironmentUnfit
from elastic_spark.report import render_html, render_png, render_text

GOLDEN = Path(__file__).parent / "goldens" / "churn.jsonl"


@pytest.fixture
def golden():
    with GOLDEN.open() as lines:
        return list(ev.read_log(lines))


class Page(HTMLParser):
    """Checks that tags nest, and notes elements, attributes and text."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def said(self):
        return " ".join(self.text)


def test_the_page_tells_the_story(golden):
    page = Page(render_html(golden, "flights"))
    text = page.said()
    for words in (
        "77,100 once, 0 twice, 0 never",
        "32 steps, 8,036 rows",
        "all workers lost",
        "lost w2",
        "0.34 s",
        "file:///mnt/ckpt/flights-1a2b/0000000060",
        "Last output of w2",
        "SHA-256 differs",
        "✗ look",
    ):
        assert words in text, words
    labels = [a["aria-label"] for tag, a in page.elements if "aria-label" in a]
    assert "w2 on 10.0.0.3: started +0.41 s, member from +2.10 s, lost +6.36 s (executor lost)" in labels
    assert sum(tag == "pattern" for tag, _ in page.elements) == 1


def test_the_page_stands_alone(golden):
    page = render_html(golden, "flights")
    tags = {tag for tag, _ in Page(page).elements}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "image", "use", "form"})
    assert not re.search(r"(src|href|action)\s*=|url\((?!#)|@import|https?://(?!www\.w3\.org)", page)
    assert "prefers-color-scheme: dark" in page
    assert len(page.encode()) < 100_000


def test_every_bar_and_mark_can_be_reached_and_says_what_it_is(golden):
    elements = Page(render_html(golden, "flights")).elements
    reachable = [a for tag, a in elements if tag == "g" and a.get("tabindex") == "0"]
    assert len(reachable) == 7 + 4 + 3 + 1  # workers, changes, checkpoints, a roll-back
    assert all(a["role"] == "img" and a["aria-label"] for a in reachable)


def test_nothing_from_the_log_becomes_markup():
    evil = "<script>alert(1)</script>\x00\x1b[31m&\"'"
    log = [
        ev.WorkerSpawned(at=1.0, worker=evil, agent="a", host=evil, executor="1", pid=1),
        ev.WorkerLost(at=2.0, worker=evil, cause=evil, detail=evil, tail=evil),
        ev.UserFailed(at=2.0, worker=evil, rank=0, step=1, error=evil, traceback=evil),
        ev.MetricsReported(at=2.0, step=1, values={evil: 1.0}),
        ev.MetricsReported(at=2.0, step=2, values={evil: 2.0}),
        ev.CheckpointRejected(at=2.0, uri=evil, reason=evil),
        ev.JobFinished(at=3.0, status="FAILED", error=evil),
    ]
    page = render_html(log, evil)
    assert "script" not in {tag for tag, _ in Page(page).elements}
    assert "\x00" not in page
    assert "\x1b" not in page


def test_empty_and_odd_logs():
    assert "The log is empty." in render_html([], "nothing")
    start = {"job_name": "j", "job_id": "i", "run_id": "r", "num_proc": 2, "min_num_proc": 1, "max_num_proc": 2}
    log = [
        ev.JobStarted(at=5.0, **start),
        ev.WorkerSpawned(at=5.0, worker="w0", agent="a", host="h", executor="1", pid=1),
        ev.MetricsReported(at=5.0, step=1, values={"loss": float("nan")}),
        ev.MetricsReported(at=5.0, step=1, values={"loss": float("inf")}),
    ]
    page = Page(render_html(log, "odd"))
    assert "Too few steps for a chart." in page.said()
    steps = ev.StepsCommitted(at=6.0, generation=1, first_step=1, times=(5.0, 6.0), rows=8)
    assert "Too few" not in render_html([steps], "steps of a world that the log does not tell of")
    assert any("never a member, there to the end" in a.get("aria-label", "") for _, a in page.elements)


def test_a_thousand_workers_and_changes_stay_readable():
    log = []
    for n in range(1, 1_200):
        at = float(n)
        members = (f"w{n}",)
        log += [
            ev.WorkerSpawned(at=at, worker=f"w{n}", agent="a", host="h", executor="1", pid=1),
            ev.GenerationFormed(
                at=at, generation=n, members=members, joined=members, lost=(), left=(), cause="x", source="w", step=n
            ),
            ev.StepsCommitted(at=at, generation=n, first_step=n, times=(at + 0.1,), rows=1),
            ev.WorkerLeft(at=at + 0.5, worker=f"w{n}", reason="draining"),
        ]
    page = render_html(log, "many")
    assert "1049 more workers are not drawn" in page
    assert "(the first 1,000)" in page
    assert len(page) < 2_000_000


def test_text(golden):
    text = render_text(summarise(golden))
    assert "  rows               77,100 once, 0 twice, 0 never" in text
    assert "gen 2: 4 -> 3 workers (executor lost), pause 0.34 s" in text
    assert "Changes" not in render_text(summarise([]))


def test_picture(golden, tmp_path):
    for name, log in (("full.png", golden), ("empty.png", [])):
        render_png(log, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "full.png").stat().st_size > 10_000


def test_a_picture_without_matplotlib_says_what_is_missing(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentUnfit, match="pip install matplotlib"):
        render_png([], tmp_path / "x.png")


def test_page_and_text_agree_with_the_log_read_again(golden):
    again = list(ev.read_log(ev.to_json(event) for event in golden))
    assert report.render_html(again, "x") == report.render_html(golden, "x")
