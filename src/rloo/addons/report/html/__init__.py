"""report.html: what one or several runs did, as one file that needs no network.

`folders` reads what a run left, `series` makes curves of it, `content` says what is on the page,
`document` makes the file, `command` is `rloo report`, and `follow` serves it while a run goes on.
What is shown of a run's texts is data: nothing here or in `page.js` makes markup of it.
"""

from rloo.addons.report.html.document import write_page
from rloo.tracking.jsonl import PAGE

__all__ = ["PAGE", "write_page"]
