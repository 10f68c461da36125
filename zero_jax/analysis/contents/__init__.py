"""The contents of a sharded state: `leaves` lists them, `page` draws them as HTML with SVG."""

from zero_jax.analysis.contents.leaves import StateSummary, summary

__all__ = ["StateSummary", "summary"]
