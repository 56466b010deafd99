"""Texts stay texts, and elements are what they were made as."""

from __future__ import annotations

from petune.report.markup import Markup, element, escaped, join, table
from tests.made_runs import Parsed


def test_a_text_stays_a_text_wherever_it_stands() -> None:
    hostile = "</td><script>alert(1)</script><img src=x onerror='alert(2)'>\" onload=\"x"
    page = Parsed(element("td", hostile, title=hostile))
    assert [name for name, _ in page.elements] == ["td"]
    assert page.elements[0][1]["title"] == hostile and page.text == hostile


def test_what_orders_or_hides_other_text_is_written_out() -> None:
    assert escaped("a\x00b\u202ec\ud800") == "a\\x00b\\u202ec\\ud800"
    assert "\\u2066" in element("p", "\u2066", title="\u2066")


def test_markup_is_not_escaped_twice() -> None:
    inner = element("b", "1 < 2")
    assert element("p", inner, " & more") == "<p><b>1 &lt; 2</b> &amp; more</p>"
    assert join((inner, "<")) == "<b>1 &lt; 2</b>&lt;" and isinstance(join(()), Markup)


def test_attributes_are_left_out_or_stand_alone() -> None:
    assert element("details", open=True, id=None, hidden=False) == "<details open></details>"
    assert element("meta", name="x", class_="n", data_live="/") == '<meta name="x" class="n" data-live="/">'


def test_a_table_names_its_rows_and_aligns_its_numbers() -> None:
    page = Parsed(table(("run", "loss"), [("one", "0.5")], numbers=(1,), caption="all"))
    assert [(cell["scope"], cell.get("class")) for cell in page.all("th")] == [
        ("col", None),
        ("col", "n"),
        ("row", None),
    ]
    assert page.all("td") == [{"class": "n"}] and page.text == "all run loss one 0.5"
