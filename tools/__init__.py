"""How the book is made: the site, the notebooks, the exercises. Run as `python -m tools.NAME`."""

import sys

# nbformat imports jsonschema, which imports rfc3987_syntax if it is there (JupyterLab brings it), which compiles 38
# grammars: four seconds in every process, to check addresses that no notebook has. jsonschema does without.
sys.modules.setdefault("rfc3987_syntax", None)
