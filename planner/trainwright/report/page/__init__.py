"""Page of an answer: one HTML file with its own drawings, which loads nothing."""

from __future__ import annotations

from trainwright.report.page.composition import PageContent, html_page

__all__ = ["PageContent", "html_page"]
