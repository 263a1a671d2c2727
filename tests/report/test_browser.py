"""The report in a real browser: no console error, tooltips, no sideways scrolling on a phone, hostile texts shown as texts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from kvprofile.limits import parse_loss
from kvprofile.report.html import report_html
from kvprofile.store.reader import load
from tests.profile_factory import add_timings, measurements, publish_profile
from tests.report.test_html import HOSTILE

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Chromium and ChromeDriver on the path"),
]

POINT_AT = """
const plot = document.querySelectorAll('.plot')[arguments[0]];
const { place, points } = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
const box = plot.getBoundingClientRect(), [x, y] = points[arguments[1]], [left, top, width, height] = place.box;
plot.dispatchEvent(new PointerEvent('pointermove', {
  clientX: box.left + box.width * (left + width * (x - place.x[0]) / (place.x[1] - place.x[0])),
  clientY: box.top + box.height * (top + height * (1 - (y - place.y[0]) / (place.y[1] - place.y[0]))),
}));
return [points[arguments[1]][2], [...plot.querySelectorAll('.tip')].map(tip => tip.textContent)];
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        *("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "disable-sync"),
        *("disable-background-networking", "disable-component-update"),
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    rows = measurements(sources=[("qa", HOSTILE)])
    for row in rows:
        row["output_text"] = HOSTILE
    published = publish_profile(folder, rows, sources=[("qa", HOSTILE)])
    add_timings(published)
    profile = load(published)
    profile.header["receiver"]["name"] = HOSTILE
    path = folder / "report.html"
    path.write_text(report_html(profile, parse_loss("5%"), "point"), "utf-8")
    return path


def show(browser: Any, page: Path, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    begun = time.monotonic()
    browser.get(page.as_uri())
    assert time.monotonic() - begun < 30, "it hangs"  # how fast it opens is no matter of a test on shared machines


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_it_opens_without_an_error_and_does_not_scroll_sideways(browser: Any, page: Path, width: int) -> None:
    show(browser, page, width)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


def test_pointing_at_a_plan_names_it(browser: Any, page: Path) -> None:
    show(browser, page, 1280)
    for figure in (0, 1, 3):  # one of them with a logarithmic axis
        said, tips = browser.execute_script(POINT_AT, figure, 3)
        assert len(tips) == 1
        assert tips[0].split(",")[0].split()[0] == said.split(",")[0].split()[0]


def test_hostile_texts_are_shown_as_texts(browser: Any, page: Path) -> None:
    show(browser, page, 1280)
    assert browser.execute_script("return document.scripts.length") == 1 + 4, "ours and the figures' data"
    assert "<script>alert('x')</script>" in browser.find_element("tag name", "body").text
