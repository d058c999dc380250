"""The sandbox for model-written code; `README.md` beside this file says what it guarantees.

This package imports `core` and nothing else of the project. This file imports nothing at all, since the confined
process imports it on its way to `jail`.
"""
