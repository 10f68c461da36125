"""What a sharded state holds and where: `leaves` reads them, `page` draws them as a page of HTML and SVG."""

from zero_jax.analysis.contents.leaves import StateSummary, summary

__all__ = ["StateSummary", "summary"]
