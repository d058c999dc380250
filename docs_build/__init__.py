"""What the documentation site is built with: pictures, generated reference pages, and links that leave `docs/`.

`make docs` builds the site; `python -m docs_build.pictures` draws the pictures of `docs/` again.
"""
