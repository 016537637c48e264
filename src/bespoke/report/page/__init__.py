"""A page of charts and tables about runs: one HTML file that needs neither a network nor anything installed."""

from bespoke.report.page.content import page_of
from bespoke.report.page.render import html, pdf, write

__all__ = ["html", "page_of", "pdf", "write"]
