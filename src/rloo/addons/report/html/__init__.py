"""report.html: one or several runs in one file that needs no network.

`content` collects the page's data: `downsampling` makes the curves, `time_axes` the axes and the
histograms, `completion_records` the completions that are searched. `document` writes the file,
`report_command` is `rloo report`, and `server` serves the page during a run. Texts of a run are
data: neither this package nor its scripts render them as markup.
"""

from rloo.addons.report.html.document import write_page
from rloo.tracking.jsonl import PAGE

__all__ = ["PAGE", "write_page"]
