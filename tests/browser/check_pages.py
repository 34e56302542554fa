"""The report, the live page and the MLflow run in a real browser: ``make test-browser``.

Needs Debian's ``chromium`` and ``chromium-driver``, and selenium (the extra ``browser``). Screenshots are kept in
``build/screenshots``, to be looked at: no test says whether a page is good to read.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from elastic_spark.core import events as ev
from elastic_spark.core.metrics import summarise
from elastic_spark.report import render_html
from elastic_spark.status import StatusPage

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "churn.jsonl"
SCREENSHOTS = ROOT / "build" / "screenshots"
#: Clicks the first visible element whose own text is exactly this; whether there was one.
CLICK = """
    const own = item => [...item.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join('').trim();
    const found = [...document.querySelectorAll('*')].find(
        item => own(item) === arguments[0] && item.getClientRects().length);
    if (found) found.click();
    return !!found;
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome) -> webdriver.Chrome:
    """An empty page of 1100 x 900, in light colours."""
    chromium.get("about:blank")
    size(chromium, 1100, 900)
    colours(chromium, "light")
    chromium.get_log("browser")
    return chromium


def size(browser: webdriver.Chrome, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def colours(browser: webdriver.Chrome, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def keep(browser: webdriver.Chrome, name: str, whole: bool = True) -> None:
    """The page, ``whole`` as it would be without an end of the screen."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole, "format": "png"})
    (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def console(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def wait(browser: webdriver.Chrome, condition: Any, what: str, limit_s: float = 30) -> Any:
    return WebDriverWait(browser, limit_s, 0.1).until(condition, what)


def text_of(browser: webdriver.Chrome, css: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, css).text


def focused(browser: webdriver.Chrome) -> dict[str, Any]:
    """Name, tag, and outline of what has the focus."""
    script = """
        const e = document.activeElement;
        return {label: e.getAttribute('aria-label') || e.textContent, tag: e.tagName.toLowerCase(),
                outline: parseFloat(getComputedStyle(e).outlineWidth), style: getComputedStyle(e).outlineStyle};
    """
    found: dict[str, Any] = browser.execute_script(script)
    return found


def press(browser: webdriver.Chrome, key: str) -> None:
    webdriver.ActionChains(browser).send_keys(key).perform()


def overflow(browser: webdriver.Chrome) -> int:
    """By how many pixels the page is wider than the screen."""
    return int(browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth"))


# ---- the report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    with GOLDEN.open() as lines:
        path.write_text(render_html(ev.read_log(lines), "flights"), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_is_shown_without_an_error(browser: webdriver.Chrome, report: str, scheme: str) -> None:
    colours(browser, scheme)
    browser.get(report)
    keep(browser, f"report-{scheme}")
    assert console(browser) == []
    assert "77,100 once, 0 twice, 0 never" in text_of(browser, "main")
    assert overflow(browser) <= 0
    requests = browser.execute_script("return performance.getEntriesByType('resource').map(item => item.name)")
    assert requests == []


def test_the_report_can_be_read_on_a_narrow_screen(browser: webdriver.Chrome, report: str) -> None:
    size(browser, 420, 900)
    browser.get(report)
    keep(browser, "report-narrow")
    assert overflow(browser) <= 0, "tables scroll in themselves"


def test_the_report_can_be_used_with_the_keyboard_alone(browser: webdriver.Chrome, report: str) -> None:
    """Tab reaches each change, worker and mark in order, each says what it is and shows that it is meant."""
    browser.get(report)
    reached = []
    for _ in range(60):
        press(browser, Keys.TAB)
        now = focused(browser)
        if now["tag"] == "body":
            break
        if len(reached) == 6:
            keep(browser, "report-focus")
        assert now["style"] != "none", now
        assert now["outline"] >= 1, now
        reached.append(now["label"])
    marks = [label for label in reached if re.match(r"w\d+ on |gen \d|checkpoint at|steps .* undone", label)]
    assert len(marks) == 7 + 4 + 3 + 1
    details = browser.find_element(By.TAG_NAME, "details")
    assert not details.get_property("open")
    browser.execute_script("document.querySelector('summary').focus()")
    press(browser, Keys.ENTER)
    assert details.get_property("open")
    assert "GenerationFormed" in details.text
    assert console(browser) == []


# ---- the live page


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[StatusPage, Path]]:
    """A job whose log stands in the middle of the recorded one."""
    log = tmp_path / "events.jsonl"
    lines = GOLDEN.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: len(lines) // 2]))
    page = StatusPage(log, "flights")
    yield page, log
    page.close()


def test_the_live_page_follows_the_job(browser: webdriver.Chrome, live: tuple[StatusPage, Path]) -> None:
    page, log = live
    browser.get(page.url)
    assert "RUNNING" in text_of(browser, "main")
    keep(browser, "live-running")
    log.write_text(GOLDEN.read_text())
    wait(browser, lambda b: "FINISHED" in text_of(b, "main"), "the end of the job")
    assert "77,100 once, 0 twice, 0 never" in text_of(browser, "main")
    keep(browser, "live-finished")
    assert console(browser) == []
    page.close()
    wait(browser, lambda b: "has ended" in text_of(b, "#state"), "to be told that nobody is there")
    keep(browser, "live-gone")
    assert "77,100 once" in text_of(browser, "main"), "what was seen last stays"


def test_an_update_takes_nothing_out_of_the_readers_hands(
    browser: webdriver.Chrome, live: tuple[StatusPage, Path]
) -> None:
    page, log = live
    browser.get(page.url)
    browser.execute_script("document.querySelector('details').open = true; document.querySelector('g').focus()")
    meant = focused(browser)["label"]
    seen = browser.find_element(By.CSS_SELECTOR, "#story svg").id
    wait(browser, lambda b: b.find_element(By.CSS_SELECTOR, "#story svg").id != seen, "an update")
    assert focused(browser)["label"] == meant
    assert browser.find_element(By.TAG_NAME, "details").get_property("open")

    browser.execute_script("document.getElementById('pause').focus()")
    press(browser, Keys.SPACE)
    assert text_of(browser, "#state") == "Updates are paused."
    log.write_text(GOLDEN.read_text())
    browser.execute_async_script("setTimeout(arguments[0], 2500)")  # longer than the page's own turn
    assert "FINISHED" not in text_of(browser, "main")
    press(browser, Keys.SPACE)
    wait(browser, lambda b: "FINISHED" in text_of(b, "main"), "the end of the job")
    assert console(browser) == []


def test_a_link_without_its_token_shows_nothing(browser: webdriver.Chrome, live: tuple[StatusPage, Path]) -> None:
    browser.get(live[0].url.partition("?")[0])
    assert "holds a token" in text_of(browser, "body")


# ---- the run in MLflow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real ``mlflow server`` on a free port."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        f"{folder}/artifacts",
    ]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    uri = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, (folder / "log").read_text()
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=1).close()
                break
            except OSError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.3)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(250)
def test_the_run_in_mlflow_tells_the_verdict(
    browser: webdriver.Chrome, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the run's own page, without a click: the verdict as its description. And the report among its artifacts."""
    from elastic_spark.tracking import Tracker

    monkeypatch.chdir(tmp_path)
    with GOLDEN.open() as lines:
        log = list(ev.read_log(lines))
    (tmp_path / "report.html").write_text(render_html(log, "flights"), encoding="utf-8")
    tracker = Tracker(
        tracking_uri=server,
        experiment="flights",
        run_name="flights",
        job_name="flights",
        job_id="1a2b",
        spool_dir=str(tmp_path / "spool"),
    )
    run_id = tracker.start({"num_proc": 4}, {})
    for event in log:
        tracker.publish(event)
    files = {"elastic/report.html": str(tmp_path / "report.html")}
    tracker.finish("FINISHED", summary=summarise(log), artifacts=lambda: files)
    size(browser, 1400, 1600)
    link = f"{server}/#/experiments/{tracker.experiment_id}/runs/{run_id}"
    browser.get(link)
    wait(browser, lambda b: "77,100 once, 0 twice, 0 never" in text_of(b, "body"), "the verdict", 90)
    keep(browser, "mlflow-run", whole=False)
    browser.get(f"{link}/model-metrics")
    wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "svg.main-svg")) > 9, "charts", 90)
    keep(browser, "mlflow-charts", whole=False)
    browser.get(f"{link}/artifacts")
    wait(browser, lambda b: "Select a file" in text_of(b, "body"), "the artifacts", 60)
    for name in ("elastic", "report.html"):
        wait(browser, lambda b, name=name: b.execute_script(CLICK, name), name, 60)
    wait(browser, lambda b: b.find_elements(By.TAG_NAME, "iframe"), "the report among the artifacts", 60)
    browser.switch_to.frame(browser.find_element(By.TAG_NAME, "iframe"))
    wait(browser, lambda b: "Workers over time" in text_of(b, "body"), "the report's own text", 60)
    browser.switch_to.default_content()
    keep(browser, "mlflow-report", whole=False)
