"""What a person sees of a page, asked of a real browser: texts, contrast, what went out."""

from __future__ import annotations

import json
from typing import Any

from tests.support.browser import Page

SEEN = "e => e.getClientRects().length > 0"


def seen(browser: Page, selector: str) -> list[str]:
    """The text of visible elements, in their order."""
    found: list[str] = browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter({SEEN})"
        ".map(e => e.textContent.trim())"
    )
    return found


def go(browser: Page, view: str) -> None:
    """Choose a view."""
    browser.run(f"document.querySelector('nav a[data-view={view}]').click()")


def drawn(browser: Page) -> list[list[Any]]:
    """(name, visible, first and last value) of the lines of the first chart in sight, which is
    waited for."""
    found: list[list[Any]] = browser.run(
        """new Promise(done => { const look = () => {
        const chart = [...document.querySelectorAll('.chart')].find(c => c.getClientRects().length);
        if (!chart || !chart.drawn || !chart.querySelector('*')) return setTimeout(look, 50);
        done([...chart.drawn.values()].map(parts => { const line = parts.at(-1);
          const y = [...line.data_source.get_column('y')];
          return [line.name, line.visible, y[0], y.at(-1)] })) }; look() })"""
    )
    return found


def assert_harmless(browser: Page) -> None:
    """No script failed or complained since the events were cleared, and nothing was asked for."""
    browser.run("0")
    for event in browser.events:
        name, details = event["method"], event["params"]
        assert name != "Runtime.exceptionThrown", details
        assert name != "Runtime.consoleAPICalled", details
        assert name != "Log.entryAdded", details["entry"]
        if name == "Network.requestWillBeSent":
            url = details["request"]["url"]
            assert url.startswith(("file://", "about:", "data:")), f"the page has asked for {url}"


#: Texts that are seen with a contrast below 4.5 (3 where they are large) against their ground.
POOR_CONTRAST = """
(() => {
  const rgb = s => (s.match(/[\\d.]+/g) || []).map(Number);
  const part = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => .2126 * part(c[0]) + .7152 * part(c[1]) + .0722 * part(c[2]);
  const over = (top, under) => [0, 1, 2].map(
    i => top[i] * (top[3] ?? 1) + under[i] * (1 - (top[3] ?? 1)));
  const up = e => e ? [e, ...up(e.parentElement)] : [];
  const ground = e => up(e).map(n => rgb(getComputedStyle(n).backgroundColor))
    .reduceRight((under, c) => c.length ? over(c, under) : under, [255, 255, 255]);
  const poor = new Set();
  for (const e of document.querySelectorAll('body *')) {
    const says = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!says || !e.getClientRects().length || e.closest('select, .vh')) continue;
    if (e.closest('svg') && e.tagName !== 'text') continue;
    const style = getComputedStyle(e), under = ground(e),
      ink = rgb(e.tagName === 'text' ? style.fill : style.color);
    const alpha = up(e).reduce((a, n) => a * Number(getComputedStyle(n).opacity), ink[3] ?? 1);
    const [a, b] = [light(over([...ink.slice(0, 3), alpha], under)), light(under)];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5))
      poor.add(`${e.className || e.tagName}: ${e.textContent.trim()} ${ratio.toFixed(2)}`);
  }
  return [...poor];
})()
"""
