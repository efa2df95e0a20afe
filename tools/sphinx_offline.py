"""Sphinx extension: the built site asks no other host for anything.

MathJax comes from the wheel django-static-mathjax (installed without Django) and is copied into the site as
`_static/mathjax`, fonts included. Jupyter Book always loads sphinx-thebe, which writes a CDN address into every page
for a feature that is off here; that script is taken out again. Widgets need no script: stored notebooks have none
(see `tools/notebooks.py`).

It also gives a figure the alt text that its cell stored with the output: `display(fig, metadata={"image/png": {"alt":
"..."}})`. myst-nb reads width and height there, and not that.
"""

import importlib.util
import shutil
from pathlib import Path

from docutils import nodes
from myst_nb.core.render import MimeData, NbElementRenderer
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# What pages load on demand; the other bundles of the folder are copies of the same code for other uses.
MATHJAX_PARTS = ["tex-mml-chtml.js", "input/tex/extensions", "output/chtml/fonts", "a11y/assistive-mml.js", "ui"]


def mathjax_folder() -> Path:
    """The folder `es5` of MathJax 3 in the installed wheel. The wheel's module is not imported: it wants Django."""
    spec = importlib.util.find_spec("mathjax")
    if spec is None or not spec.submodule_search_locations:
        raise ExtensionError("MathJax is missing: pip install --no-deps django-static-mathjax==3.2.2.1")
    return Path(spec.submodule_search_locations[0], "static", "mathjax", "es5")


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """At the end of a successful build: copy MathJax beside the theme's own files."""
    if error or app.builder.format != "html":
        return
    source, target = mathjax_folder(), Path(app.outdir, "_static", "mathjax")
    for part in MATHJAX_PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, dirs_exist_ok=True)
        else:
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / part, target / part)


def drop_thebe(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: object) -> None:
    """Remove sphinx-thebe's scripts and styles from a page."""
    context["script_files"] = [f for f in context.get("script_files", []) if not is_thebe(f)]
    context["css_files"] = [f for f in context.get("css_files", []) if not is_thebe(f)]


def is_thebe(asset: object) -> bool:
    """Whether a script or style tag of the page belongs to sphinx-thebe."""
    return "thebe" in str(getattr(asset, "filename", asset) or "") or "THEBE" in str(
        getattr(asset, "attributes", {}).get("body", "")
    )


def add_alt_text(renderer: type[NbElementRenderer]) -> None:
    """Extend myst-nb's `render_image`."""
    plain = renderer.render_image

    def render_image(self: NbElementRenderer, data: MimeData) -> list[nodes.Element]:
        images = plain(self, data)
        if alt := data.output_metadata.get(data.mime_type, {}).get("alt"):
            images[0]["alt"] = alt
        return images

    renderer.render_image = render_image


def setup(app: Sphinx) -> dict:
    """Register with Sphinx."""
    add_alt_text(NbElementRenderer)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
