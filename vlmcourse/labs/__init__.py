"""Thin glue of the chapters, imported by their notebooks and nothing else: a module a chapter, and what they share."""
