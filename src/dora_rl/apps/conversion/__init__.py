"""Translates config files of other frameworks: one module with one table for each of them."""
