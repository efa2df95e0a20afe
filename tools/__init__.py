"""How the book is made: the site (site, sphinx_offline), the notebooks, the exercises. Run as `python -m tools.NAME`."""
