"""Tests of the documentation: pages, pictures, notebooks, site."""
