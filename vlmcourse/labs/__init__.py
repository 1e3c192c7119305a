"""Thin glue of single chapters: one module a chapter, imported by its notebook and by nothing else."""
